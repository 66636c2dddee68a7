"""Who else could put files where kvtier keeps its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.os.ownership import find_exposure, find_foreign_owner, is_ambiguous
from tests.unit.other_user import OTHER_UID, give_away


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    path = tmp_path / "disk" / "kvtier" / "store"
    path.mkdir(parents=True)
    return path


def test_a_directory_that_nobody_else_can_replace_is_fine(nested: Path) -> None:
    assert find_exposure(nested) is None
    assert find_exposure(nested / "not" / "there" / "yet") is None


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize("above", [0, 1, 2], ids=["itself", "its parent", "further up"])
def test_a_directory_into_which_others_may_write_is_named(
    nested: Path, above: int, mode: int
) -> None:
    place = [nested, *nested.parents][above]
    place.chmod(mode)
    exposure = find_exposure(nested)
    assert exposure is not None
    assert exposure.problem.startswith(f"{place} has mode {mode:04o}: other users can replace")
    assert exposure.remedy == f"run: chmod go-w {place}"


def test_directories_above_a_sticky_one_are_not_checked(nested: Path) -> None:
    kvtier, disk, *_ = nested.parents
    disk.chmod(0o777)
    kvtier.chmod(0o1777)
    assert find_exposure(nested) is None


def test_the_directory_that_a_link_leads_to_is_judged(nested: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(nested)
    assert find_exposure(link) is None
    nested.parent.chmod(0o777)
    exposure = find_exposure(link)
    assert exposure is not None
    assert exposure.problem.startswith(f"{nested.parent} has mode 0777")


@pytest.mark.parametrize("above", [0, 1, 2], ids=["itself", "its parent", "further up"])
def test_another_users_directory_is_named_also_to_root(nested: Path, above: int) -> None:
    place = [nested, *nested.parents][above]
    give_away(place)
    exposure = find_exposure(nested)
    assert exposure is not None
    assert exposure.problem.startswith(f"{place} belongs to user {OTHER_UID}")


def test_no_command_that_changes_a_directory_of_other_programs_is_advised(
    nested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 4)
    if uid == 0:
        exposure = find_exposure(nested)
        assert exposure is not None
        assert exposure.remedy == f"run: chown -R 4 {nested}"
    (nested / "passwd").touch()
    exposure = find_exposure(nested)
    assert exposure is not None
    assert "run: " not in exposure.remedy


def test_the_first_file_of_another_user_is_named(nested: Path) -> None:
    paths = [nested / name for name in "abc"]
    assert find_foreign_owner(paths) == ""
    for path in paths:
        path.touch()
    assert find_foreign_owner(paths) == ""
    give_away(paths[1])
    assert find_foreign_owner(paths) == (
        f"{paths[1]} belongs to user {OTHER_UID}, and this process runs as user {os.geteuid()}"
    )


def test_the_id_of_unmapped_users_owns_nothing() -> None:
    assert not is_ambiguous(os.geteuid())
    script = (
        "import os, sys; from pathlib import Path;"
        " from kvtier.os.ownership import find_exposure, is_ambiguous;"
        " assert is_ambiguous(os.geteuid()); assert not is_ambiguous(0);"
        " sys.stdout.write(find_exposure(Path('/')).problem)"
    )
    # A new user namespace without a map shows every user as the same one.
    command = ["unshare", "--user", sys.executable, "-c", script]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if ran.returncode and "unshare" in ran.stderr:
        pytest.skip("this machine allows no user namespaces")
    assert "stands for every user that this user namespace does not map" in ran.stdout, (
        ran.stderr
    )
