"""The design pages list the packages and modules that exist, in the order of the imports."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import DOCS, ROOT

KVTIER = ROOT / "kvtier"
DESIGN = (DOCS / "design/index.md").read_text()
CONNECTOR = (DOCS / "design/connector.md").read_text()
PRIVATE = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}


def listed() -> list[str]:
    """Return the packages and modules of the tree on the page, from top to bottom."""
    _, _, tree = DESIGN.partition("kvtier/\n")
    return re.findall(r"^  (\w+)(?:/|\.py) ", tree, re.MULTILINE)


def test_the_tree_lists_every_package_and_module() -> None:
    names = {path.name for path in KVTIER.iterdir()} - PRIVATE
    assert sorted(listed()) == sorted(name.removesuffix(".py") for name in names)


def test_the_tree_is_in_the_order_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in contracts["contracts"] if "layers" in each)
    depth = {
        name: at
        for at, layer in enumerate(layers)
        for name in re.findall(r"kvtier\.(\w+)", layer)
    }
    depths = [depth[name] for name in listed()]
    assert depths == sorted(depths)


def test_the_page_on_the_connector_names_every_module_of_it() -> None:
    modules = {path.name for path in (KVTIER / "connector").glob("*.py")} - PRIVATE
    assert modules <= set(re.findall(r"[`/](\w+\.py)`", CONNECTOR))


def test_the_page_names_every_module_of_the_manager() -> None:
    modules = {path.name for path in (KVTIER / "manager").glob("*.py")} - PRIVATE
    assert modules <= set(re.findall(r"`(\w+\.py)`", DESIGN))


def test_the_files_to_open_for_a_change_exist() -> None:
    _, _, section = DESIGN.partition("## Where to make a change")
    paths = re.findall(r"`([\w/]+\.py|policies/eviction)`", section)
    missing = [path for path in paths if not any((d / path).exists() for d in (KVTIER, ROOT))]
    assert paths
    assert missing == []
