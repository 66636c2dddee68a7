"""Files: what is read, and the one error for everything that is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.config import NvmeTierConfig, load_config, parse_config
from kvtier.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
RAM = "tiers:\n  - kind: ram\n    capacity: 1GiB\n"
NVME = "  - kind: nvme\n    path: /kv\n    capacity: 2GiB\n"


def refusal(text: str) -> str:
    """Return the error that ``text``, as file ``a.yaml``, is refused with."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="a.yaml")
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_loads(path: Path) -> None:
    config = load_config(path)
    assert config.tiers[0].kind == "ram"
    assert config.origin.source == str(path)


def test_the_examples_are_the_ones_the_manual_names() -> None:
    named = {"demo", "ram", "ram_nvme", "ram_nvme_gds", "ram_nvme_shared"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == named


def test_the_longest_example_states_every_key_and_the_true_default() -> None:
    stated = yaml.safe_load((CONFIGS / "ram_nvme.yaml").read_text())
    defaults = parse_config(RAM + NVME, source="").model_dump(mode="json", by_alias=True)
    assert [set(tier) for tier in stated["tiers"]] == [set(tier) for tier in defaults["tiers"]]
    for tier in (*stated["tiers"], *defaults["tiers"]):
        for differs in ("capacity", "path"):
            tier.pop(differs, None)
    stated["engine"]["blocks_per_chunk"] = 1
    assert stated == defaults


def test_everything_but_the_tiers_has_a_default() -> None:
    config = parse_config(RAM + NVME, source="a.yaml")
    assert config.placement.write == "through"
    assert config.placement.pin_budget == 0.5
    assert config.transfer.queue_limit_bytes == 512 << 20
    assert config.transfer.load_timeout_s == 10.0
    assert config.engine.store_decode
    nvme = config.tiers[1]
    assert isinstance(nvme, NvmeTierConfig)
    assert nvme.path == Path("/kv")


def test_a_dumped_configuration_reads_back_equal() -> None:
    config = load_config(CONFIGS / "ram_nvme.yaml")
    text = yaml.safe_dump(config.model_dump(mode="json", by_alias=True))
    assert parse_config(text, source="b.yaml") == config


def test_off_is_a_word_and_not_false() -> None:
    text = f"{RAM}{NVME}    direct_io: off\n"
    nvme = parse_config(text, source="a.yaml").tiers[1]
    assert isinstance(nvme, NvmeTierConfig)
    assert nvme.direct_io == "off"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.yaml: the file is empty; name at least one tier"),
        ("# only a comment\n", "a.yaml: the file is empty"),
        ("- a\n", "a.yaml: the file is not a mapping; start with tiers:"),
        ("tiers:\n\t- kind: ram\n", "a.yaml:2: '- kind: ram' is indented with a tab"),
        (f"{RAM}\tname: b\n", "a.yaml:4: 'name: b' is indented with a tab"),
        ("a: b: c\n", "a.yaml:1: 'a: b: c': mapping values are not allowed here"),
        (f"{RAM}x: [1,\n", "a.yaml:5: expected the node content"),
        (f"{RAM}---\n{RAM}", "a.yaml:4: '---': but found another document"),
        (f"{RAM}{RAM}", "a.yaml:4: tiers: written twice; it is on line 1 already"),
        (f"{RAM}    kind: ram\n", "a.yaml:4: tiers[0].kind: written twice; it is on line 2"),
        (f"{RAM}x: &y 1\nz: *y\n", "a.yaml:5: 'z: *y': an alias; write the value out"),
        (f"{RAM}x: !!int '4'\n", "a.yaml:4: \"x: !!int '4'\": a tag; write the plain value"),
        (f"{RAM}? [a]\n: b\n", "a.yaml:4: a key that is not a word"),
        ("[" * 99, "nested too deep"),
        ("a: \x00\n", r"a.yaml:1: '\x00' may not be in YAML; remove it"),
        ("a: 1\n\nb:\x0c\n", r"a.yaml:3: '\x0c' may not be in YAML; remove it"),
    ],
)
def test_text_that_is_not_a_configuration_is_refused(text: str, message: str) -> None:
    assert message in refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "tiers: " + "[" * 100_000,
        "a:\n\t" + "b" * 100_000,
        f"? {'b' * 100_000}\n: 1\n",
        f"? {'b' * 100_000}\n: 1\n" * 2,
        f"tiers: [{{kind: ram, capacity: {'4' * 100_000}}}]",
    ],
    ids=["nested", "tab", "unknown key", "key twice", "value"],
)
def test_a_message_shows_only_the_beginning_of_a_long_line(text: str) -> None:
    assert max(map(len, refusal(text).splitlines())) < 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {}\n", "a.yaml: tiers: missing; add tiers:"),
        ("tiers: []\n", "a.yaml:1: tiers: not a list of tiers"),
        ("tiers: {kind: ram}\n", "a.yaml:1: tiers: not a list of tiers"),
        ("tiers:\n  - ram\n", "a.yaml:2: tiers[0] = ram: not a tier; write {kind: ram"),
        ("tiers:\n  - capacity: 1GiB\n", "a.yaml:2: tiers[0].kind: missing; add kind: ram"),
        ("tiers:\n  - kind: ram\n", "a.yaml:2: tiers[0].capacity: missing; add capacity: "),
        (f"{RAM}  - kind: nvme\n    capacity: 1GiB\n", "a.yaml:4: tiers[1].path: missing; add"),
        (NVME.join(["tiers:\n", ""]), "a.yaml:2: tiers[0].kind = nvme: the first tier is not"),
        (
            f"{RAM}  - kind: ram\n    name: b\n    capacity: 1GiB\n",
            "a.yaml:4: tiers[1].kind = ram: ram is a tier already; keep one",
        ),
        (
            f"{RAM}{NVME}    name: ram\n",
            "a.yaml:7: tiers[1].name = ram: tiers[0] has the same name; add name:",
        ),
        (
            f"{RAM}{NVME}{NVME}    name: b\n",
            "a.yaml:8: tiers[2].path = /kv: another tier has the same path",
        ),
        (
            f"{RAM}  - kind: nvem\n    capacity: 1GiB\n",
            "a.yaml:4: tiers[1].kind = nvem: no such tier kind is installed; installed: moonc",
        ),
        (
            f"{RAM}    eviction: lur\n",
            "a.yaml:4: tiers[0].eviction = lur: no such eviction policy is installed; inst",
        ),
        (
            f'{RAM}    eviction: "shutil:Error\\n"\n',
            r"a.yaml:4: tiers[0].eviction = shutil:Error\n: no such eviction policy is inst",
        ),
        (
            "tiers:\n  - kind: ram\n    capacity: 1B\n",
            "a.yaml:3: tiers[0].capacity = 1B: less than the 4KiB of the smallest slot; write",
        ),
        *(
            (
                f"{RAM}  - kind: nvme\n    capacity: 1GiB\n    path: {path}\n",
                f"a.yaml:6: tiers[1].path{shown}: {problem}",
            )
            for path, shown, problem in (
                ("12", " = 12", "not a path; write one such as /var/lib/kvtier"),
                ("''", "", "not an absolute path; write it from the root"),
                ("/", " = /", "the root of the file system; name a directory that only"),
                ("/kv/..", " = /kv/..", "the root of the file system; name a directory"),
                ('"/kv\\n"', r" = /kv\n", "control characters; write it without"),
            )
        ),
        (f"{RAM}    name: My tier\n", "a.yaml:4: tiers[0].name = My tier: not a name kvtier"),
        (
            f"{RAM}  - kind: nvme\n    path: kv\n    capacity: 1GiB\n",
            "a.yaml:5: tiers[1].path = kv: not an absolute path; write it from the root",
        ),
        (
            f"{RAM}{NVME}    direct_io: requir\n",
            "a.yaml:7: tiers[1].direct_io = requir: not a choice; write auto or require or off",
        ),
    ],
)
def test_tiers_that_cannot_work_are_refused(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"{RAM}  - kind: NVMe\n    capacity: 1GiB\n", "nvme"),
        (f"{RAM}    eviction: lur\n", "lru"),
        (f"{RAM}{NVME}    direct_io: requir\n", "require"),
        (f"{RAM}    capasity: 1GiB\n", "capacity"),
    ],
)
def test_a_word_that_is_nearly_right_is_answered_with_the_right_one(
    text: str, word: str
) -> None:
    assert refusal(text).endswith(f"did you mean {word}?")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("enigne: {}", "a.yaml:4: enigne: unknown key; did you mean engine?"),
        ("zzz: 1", "a.yaml:4: zzz = 1: unknown key; known: engine, identity, placement"),
        ("transfer:", "a.yaml:4: transfer: not a section; put keys below it, or leave it out"),
        (
            "transfer:\n  io_treads: 4",
            "a.yaml:5: transfer.io_treads = 4: unknown key; did you mean io_threads?",
        ),
        (
            "transfer:\n  piece_bytes: 1MiB",
            "a.yaml:5: transfer.piece_bytes = 1MiB: unknown key; did you mean piece?",
        ),
        ("transfer:\n  io_threads: 0", "a.yaml:5: transfer.io_threads = 0: less than 1; write"),
        ("engine:\n  blocks_per_chunk: 999999999999", "more than 65536; write at most 65536"),
        ("trace:\n  record: /", "trace.record = /: the root of the file system; name a"),
        ('trace:\n  record: "/a\\0b"', r"trace.record = /a\x00b: control characters; write it"),
        ('"e\\e[2J": 1', r"a.yaml:4: e\x1b[2J = 1: unknown key; known: engine"),
        ("transfer:\n  io_threads: true", "= true: not a whole number"),
        ("transfer:\n  io_threads: 4.0", "= 4.0: not a whole number"),
        ("transfer:\n  io_threads: '4'", "= 4: not a whole number; write one such as 4, with"),
        ("transfer:\n  load_timeout: 10", "= 10: 10 has no unit; write 10s; units are us, ms"),
        ("transfer:\n  load_timeout: 0s", "= 0s: not more than 0; write more than 0"),
        ("transfer:\n  piece: 1GiB", "transfer.piece = 1GiB: larger than queue_limit; lower"),
        ("transfer:\n  piece: 5000B", "= 5000B: not a multiple of 4096 bytes; write a mult"),
        ("transfer:\n  queue_limit: 4GiB/s", "is not a size; write one such as 64GiB"),
        ("placement:\n  pin_budget: 0.5", "= 0.5: 0.5 has no percent sign; write 50%"),
        ("placement:\n  pin_budget: 50", "= 50: 50 has no percent sign; write 50%"),
        ("placement:\n  pin_budget: true", "= true: not a value such as 50%; write one"),
        ("placement:\n  pin_budget: 5GiB", "no percent sign; write 5%"),
        ("placement:\n  write: throguh", "write through or evict; did you mean through?"),
        ("engine:\n  store_decode: yes", "= yes: not true or false; write true or false"),
        ("engine:\n  store_decode: 1", "= 1: not true or false; write true or false"),
        ("identity:\n  model_revision: 12", "= 12: not text; put it in quotes"),
        ('identity: {name: "a\\nb"}', r"identity.name = a\nb: control characters; write it"),
        ('identity: {model_revision: "a\\e[2Jb"}', r"= a\x1b[2Jb: control characters; write"),
        ("identity:\n  weights_epoch: -1", "= -1: less than 0; write at least 0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_line_and_a_remedy(lines: str, message: str) -> None:
    assert message in refusal(f"{RAM}{lines}\n")


@pytest.mark.parametrize("capacity", ["64", "64G", "-1GiB", "0GiB", "true", "1e9", "[1]", ""])
def test_a_capacity_without_a_clear_meaning_is_refused(capacity: str) -> None:
    message = refusal(f"tiers:\n  - kind: ram\n    capacity: {capacity}\n")
    assert re.match(r"a\.yaml:3: tiers\[0\]\.capacity.*; write ", message)


@pytest.mark.parametrize("record", ["/kv/../kv/store", "/kv/store/recorded", "/kv"])
def test_a_recording_and_a_store_need_two_directories(record: str) -> None:
    nvme = NVME.replace("path: /kv", "path: /kv/store")
    message = refusal(f"{RAM}{nvme}trace:\n  record: {record}\n")
    assert message == (
        f"a.yaml:8: trace.record = {record}: in the path of tiers[1], or around it; use two "
        "directories, neither in the other"
    )


def test_a_capacity_of_zero_is_no_size() -> None:
    message = refusal(RAM.replace("1GiB", "0GiB"))
    assert message.endswith("= 0GiB: 0GiB is no size; write one such as 64GiB")


def test_of_very_many_problems_the_first_are_shown_and_the_rest_is_counted() -> None:
    first, *others = refusal(RAM + "".join(f"k{n}: 1\n" for n in range(3000))).splitlines()
    assert first.startswith("a.yaml:4: k0 = 1: unknown key")
    assert len(others) == 20
    assert others[-1] == "a.yaml: 2,980 more problems; fix these first"


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "weights.yaml"
    file.write_bytes(b"k: 1\n" * (1 << 20))
    with pytest.raises(ConfigError, match=r"weights\.yaml: larger than 256 KiB, too large"):
        load_config(file)


def test_every_problem_has_one_line_in_the_order_of_the_file() -> None:
    message = refusal(
        "transfer:\n  io_treads: 4\n  piece: 3\n"
        "tiers:\n  - kind: ram\n    capacity: 1G\n    colour: red\n"
    )
    lines = [line.split(" =")[0] for line in message.splitlines()]
    assert lines == [
        "a.yaml:2: transfer.io_treads",
        "a.yaml:3: transfer.piece",
        "a.yaml:6: tiers[0].capacity",
        "a.yaml:7: tiers[0].colour",
    ]


@example("tiers:\n  - kind: ram\n    capacity: 1GiB\n")
@example('a: "\\UFFFFFFFF"')
@example("a: " + "9" * 5000)
@given(
    st.text(
        alphabet=st.sampled_from("tiers:kndam capty1GB-\n\t[]{}'\"&*!|>#%@\\?,~"), max_size=80
    )
)
def test_any_text_is_a_configuration_or_one_error(text: str) -> None:
    try:
        config = parse_config(text, source="a.yaml")
    except ConfigError as error:
        named = str(error).startswith("a.yaml")
    else:
        named = config.origin.source == "a.yaml"
    assert named


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: no such file; check the path"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="is a directory; name a file in it"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(CONFIGS / "demo.yaml" / "below")
    (tmp_path / "latin1.yaml").write_bytes(b"tiers:\n  # caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin1\.yaml:2: not UTF-8 text"):
        load_config(tmp_path / "latin1.yaml")


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "bom.yaml"
    file.write_text(RAM, encoding="utf-8-sig")
    assert load_config(str(file)).tiers[0].name == "ram"
