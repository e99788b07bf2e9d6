"""Reading, overriding and checking settings, with small plugins made up for these tests."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fclmodels import plugins
from fclmodels.errors import UserError
from fclmodels.settings.load import collect_settings, flatten_settings, load_method_settings, load_params

PLUGIN = """
from typing import Literal
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator
from fclmodels.settings import schema

class Plugin:
    name = "{name}"
    class Settings(schema.{base}):
        {fields}
"""
NORMED = """norm: Literal["batch", "group"] = Field("batch", description="kind of norm")
        groups: int = Field(4, description="groups of a group norm")
        @field_validator("groups")
        @classmethod
        def even(cls, groups):
            if groups % 2:
                raise ValueError("groups come in pairs.")
            return groups
        @model_validator(mode="after")
        def fits(self):
            if self.norm == "batch" and self.groups > 90:
                raise ValueError("so many groups need norm: group.")
            return self"""
PLUGINS = {
    "method": ("Settings", {"fedavg": "pass", "fedprox": 'mu: NonNegativeFloat = Field(0.01, description="pull")'}),
    "source": ("ImageSettings", {"digits": "pass", "tree": 'depth: int = Field(1, description="levels")'}),
    "stream": ("StreamSettings", {"class-incremental": 'tasks: PositiveInt = Field(5, description="number")'}),
    "partition": (
        "PartitionSettings",
        {
            "dirichlet": 'alpha: PositiveFloat = Field(0.5, description="concentration")',
            "iid": 'rest: Literal["drop", "deal"] = Field("deal", description="what does not divide evenly")',
            "shards": 'alpha: PositiveFloat = Field(0.5, description="concentration")',
        },
    ),
    "backbone": ("BackboneSettings", {"cnn": "pass", "resnet": NORMED}),
}


@pytest.fixture(scope="module", autouse=True)
def stubs(tmp_path_factory):
    root = tmp_path_factory.mktemp("stubs")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        for kind, (base, fields) in PLUGINS.items():
            package = root / f"stub_{kind}"
            package.mkdir()
            (package / "__init__.py").touch()
            patch.setitem(plugins.PACKAGES, kind, package.name)
            for name, body in fields.items():
                source = PLUGIN.format(name=name, base=base, fields=body)
                (package / f"{name.replace('-', '_')}.py").write_text(source)
        yield


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes a params.yaml, so that errors name it as a user sees it."""
    monkeypatch.chdir(tmp_path)

    def write(content: str | bytes) -> str:
        Path("params.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
        return "params.yaml"

    return write


def refusal(path: str | Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_params(path, overrides)
    return str(caught.value)


WRONG = {
    "federation:\n  batch_size: 8\n\n  roundz: 3\n": (
        "params.yaml:4: federation.roundz is not a setting. Did you mean federation.rounds?"
    ),
    "federaton:\n  rounds: 3\n": "params.yaml:1: federaton is not a setting. Did you mean federation?",
    "partition: {kind: iid, alhpa: 3}": (
        "params.yaml:1: partition.alhpa is not a setting. Did you mean partition.alpha?"
    ),
    "federation:\n  lr: 0.1\n": "params.yaml:2: federation.lr is not a setting. Did you mean optimizer.lr?",
    "augment:\n  batch_size: 1\n": (
        "params.yaml:2: augment.batch_size is not a setting. "
        "Did you mean federation.batch_size or evaluation.batch_size?"
    ),
    "rounds: 3": "params.yaml:1: rounds is not a setting. Did you mean federation.rounds?",
    "mu: 3": "params.yaml:1: mu is not a setting. Did you mean methods.fedprox.mu?",
    "model: {kind: cnn}": "params.yaml:1: model.kind is not a setting. Did you mean model.backbone?",
    "evaluation:\n  xyzzy: 1\n": "params.yaml:2: evaluation.xyzzy is not a setting. Valid: batch_size.",
    "methods:\n  fedavg: {xyzzy: 1}\n": "params.yaml:2: methods.fedavg.xyzzy is not a setting. Valid: none here.",
    "partition:\n  alpha: -1": "params.yaml:2: partition.alpha is -1; it must be greater than 0.",
    "partition:\n  val: 1": "params.yaml:2: partition.val is 1; it must be less than 1.",
    "optimizer: {lr: .inf}": (
        "params.yaml:1: optimizer.lr is Infinity; it must be a number greater than 0 and at most 1e+30."
    ),
    "optimizer: {lr: 1e999}": (
        "params.yaml:1: optimizer.lr is Infinity; it must be a number greater than 0 and at most 1e+30."
    ),
    "federation:\n  local_epochs: many": (
        'params.yaml:2: federation.local_epochs is "many"; it must be a whole number greater than 0.'
    ),
    'federation:\n  local_epochs: "3"': (
        'params.yaml:2: federation.local_epochs is "3"; it must be a whole number greater than 0.'
    ),
    "federation:\n  local_epochs: true": (
        "params.yaml:2: federation.local_epochs is true; it must be a whole number greater than 0."
    ),
    "federation:\n  local_epochs:\n": (
        "params.yaml:2: federation.local_epochs is null; it must be a whole number greater than 0."
    ),
    "augment: {flip: no}": 'params.yaml:1: augment.flip is "no"; it must be true or false.',
    "federation:\n  rounds: [3, 0]": (
        "params.yaml:2: federation.rounds is [3, 0]; "
        "it must be a whole number greater than 0, or a list, each item a whole number greater than 0."
    ),
    "data:\n  std:\n  - 0.5\n  - 0\n": (
        "params.yaml:2: data.std is [0.5, 0]; it must be a list, each item a number greater than 0."
    ),
    "augment:\n  resize_crop: [1]\n": (
        "params.yaml:2: augment.resize_crop is [1]; "
        "it must be a list of 2, each item a number greater than 0 and at most 1, or null."
    ),
    "experiment: {seeds: []}": (
        "params.yaml:1: experiment.seeds is []; it must be a list of at least 1, each item a whole number at least 0."
    ),
    "optimizer:\n  kind: sdg\n": 'params.yaml:2: optimizer.kind is "sdg"; it must be sgd, adam or adamw.',
    "device: gpu": 'params.yaml:1: device is "gpu"; it must be auto, cpu or cuda, or text of the form cuda:[0-9]+.',
    "methods:\n  fedprox:\n    mu: -1": (
        "params.yaml:3: methods.fedprox.mu is -1; it must be greater than or equal to 0."
    ),
    "model: {backbone: resnet, groups: 3}": "params.yaml:1: model.groups is 3: groups come in pairs.",
    "\nmodel:\n  backbone: resnet\n  groups: 92": "params.yaml:2: model: so many groups need norm: group.",
    "partition:\n  kind: dirichle\n": (
        "params.yaml:2: partition.kind: dirichle is not a partition. Did you mean dirichlet?"
    ),
    "partition:\n  kind: xyzzy\n": (
        "params.yaml:2: partition.kind: xyzzy is not a partition. Valid: dirichlet, iid, shards."
    ),
    "partition: {kind: 3}": "params.yaml:1: partition.kind is 3; it must be text.",
    "methods:\n  fedprx: {mu: 1}\n": "params.yaml:2: methods.fedprx: fedprx is not a method. Did you mean fedprox?",
    "experiment:\n  methods: [fedavg, fedprx]\n": (
        "params.yaml:2: experiment.methods: fedprx is not a method. Did you mean fedprox?"
    ),
    "experiment:\n  seeds: [4, 4]\n": "params.yaml:2: experiment.seeds holds 4 twice.",
    "federation:\n  clients_per_round: 20\npartition:\n  clients: 10\n": (
        "params.yaml:2: federation.clients_per_round is 20, but partition.clients is only 10."
    ),
    "federation: 3": "params.yaml:1: federation is 3; it must be a block of settings.",
    "methods:\n- fedavg\n": 'params.yaml:1: methods is ["fedavg"]; it must be a block of settings.',
    "methods: {fedprox: 0.1}": "params.yaml:1: methods.fedprox is 0.1; it must be a block of settings.",
    "federation:\n  rounds: 3\n  batch_size: 8\n  rounds: 4\n": (
        "params.yaml:4: federation.rounds is set twice, first at params.yaml:2."
    ),
    "- 1\n- 2\n": "params.yaml:1: [1, 2] is not a block of settings. Write a name, a colon, a value.",
    "hello": 'params.yaml:1: "hello" is not a block of settings. Write a name, a colon, a value.',
    "federation:\n\trounds: 3\n": "params.yaml:2: not YAML at column 1: a tab; YAML is indented by spaces.",
    "federation:\n  rounds: [3, 4\n\ndevice: cpu\n": (
        "params.yaml:4: not YAML at column 7: while parsing a flow sequence, expected ',' or ']', but got ':'."
    ),
    "device: cpu\n---\ndevice: cpu\n": (
        "params.yaml:2: not YAML at column 1: expected a single document in the stream, but found another document."
    ),
    "device: *x": "params.yaml:1: not YAML at column 9: found undefined alias 'x'.",
    "device: !!python/object/apply:os.system [reboot]": (
        "params.yaml:1: a value that is tagged 'tag:yaml.org,2002:python/object/apply:os.system' cannot be read."
    ),
    "device: !!int cpu": "params.yaml:1: a value that is tagged 'tag:yaml.org,2002:int' cannot be read.",
    'device: "\\UFFFFFFFF"': "params.yaml:1: not YAML at column 12: a number out of range.",
    'data:\n  root: "a\\nb"': "params.yaml:2: 'a\\nb' holds a character that cannot be printed.",
    '"a\\nb": 1': "params.yaml:1: the name before a colon must be printable text.",
    "\n{a: 1}: 2": "params.yaml:2: the name before a colon must be printable text.",
    b"device: cpu\nfederation:\x00\n": "params.yaml:2: character 0x0 does not belong in a text.",
    b"# caf\xc3\xa9\ndevice: \xe9\n": "params.yaml:2: not UTF-8 text. Save the file as UTF-8.",
}


@pytest.mark.parametrize(("content", "message"), WRONG.items())
def test_a_mistake_in_the_file_is_one_line_with_its_place(file, content, message):
    assert refusal(file(content)) == message


WRONG_OVERRIDES = {
    "partition.alpha=-1": "--set partition.alpha=-1: partition.alpha is -1; it must be greater than 0.",
    "federation.roundz=3": (
        "--set federation.roundz=3: federation.roundz is not a setting. Did you mean federation.rounds?"
    ),
    "federaton.rounds=3": "--set federaton.rounds=3: federaton is not a setting. Did you mean federation?",
    "federation.clients_per_round=0": (
        "--set federation.clients_per_round=0: federation.clients_per_round is 0; "
        "it must be a whole number greater than 0, or null."
    ),
    "federation={roundz: 1}": (
        "--set federation={roundz: 1}: federation.roundz is not a setting. Did you mean federation.rounds?"
    ),
    "device.cpu=1": "--set device.cpu=1: device is not a block of settings.",
    "partition.kind=shrads": (
        "--set partition.kind=shrads: partition.kind: shrads is not a partition. Did you mean shards?"
    ),
    "partition.rest=drop": "--set partition.rest=drop: partition.rest has no effect where partition.kind is dirichlet.",
    "partition.clients=3": (
        "--set partition.clients=3: federation.clients_per_round is 5, but partition.clients is only 3."
    ),
    "federation.rounds": "--set federation.rounds: write a setting and its value, as in --set federation.rounds=3.",
    "federation.rounds=": "--set federation.rounds=: write a setting and its value, as in --set federation.rounds=3.",
    "=3": "--set =3: write a setting and its value, as in --set federation.rounds=3.",
    "a..b=3": "--set a..b=3: write a setting and its value, as in --set federation.rounds=3.",
    "device=cpu\nx": "--set device=cpu\\nx: write a setting and its value, as in --set federation.rounds=3.",
    "federation.rounds=[1": (
        "--set federation.rounds=[1: not YAML at column 3: "
        "while parsing a flow sequence, expected ',' or ']', but got '<stream end>'."
    ),
}


@pytest.mark.parametrize(("override", "message"), WRONG_OVERRIDES.items())
def test_a_mistake_in_an_override_names_it(file, override, message):
    assert refusal(file("device: cpu\nfederation: {clients_per_round: 5}\n"), override) == message


def test_settings_that_do_not_fit_each_other_are_told_with_all_places_that_may_be_wrong(file):
    path, message = file("device: cpu\nmodel:\n  backbone: resnet\n"), "model: so many groups need norm: group."
    assert refusal(path, "model.groups=92") == f"params.yaml:2, --set model.groups=92: {message}"
    assert refusal(path, "model.groups=92", "device=cpu", "model.norm=batch") == (
        f"params.yaml:2, --set model.groups=92, --set model.norm=batch: {message}"
    )
    overrides = ["model.backbone=resnet", "model.groups=92"]
    assert refusal(file(""), *overrides) == f"--set {overrides[0]}, --set {overrides[1]}: {message}"


def test_all_mistakes_are_listed_in_file_order_and_overrides_last(file):
    path = file(
        "optimizer: {lr: 0}\n"
        "methods: {fedprox: {mu: x}}\n"
        "partition:\n"
        "  kind: nix\n"
        "  alpha: 1\n"
        "  clients: 0\n"
        "data:\n"
        "  sizes: 1\n"
        "device: 3\n"
    )
    lines = refusal(path, "stream.tasks=0", "model.heads=1").split("\n")
    assert [line.split(" is ")[0] for line in lines] == [
        "params.yaml:1: optimizer.lr",
        "params.yaml:2: methods.fedprox.mu",
        "params.yaml:4: partition.kind: nix",
        "params.yaml:6: partition.clients",
        "params.yaml:8: data.sizes",
        "params.yaml:9: device",
        "--set stream.tasks=0: stream.tasks",
        "--set model.heads=1: model.heads",
    ]


def test_no_file_a_folder_and_a_huge_file_are_told(file, tmp_path):
    assert refusal("other.yaml") == "other.yaml: no such file. Work in the folder that holds it."
    assert refusal(tmp_path) == f"{tmp_path}: cannot be read: Is a directory."
    assert refusal(file(b"#" * 200_001)) == "params.yaml: larger than 200,000 bytes, too large for settings."


@pytest.mark.parametrize("content", ["", "\n# only a comment\n", "---\n", "{}", b"\xef\xbb\xbf", "data:\nmethods:\n"])
def test_nothing_written_means_all_defaults(file, content):
    params = load_params(file(content))
    assert (params.data.source, params.stream.tasks, params.partition.alpha) == ("digits", 5, 0.5)
    assert params.methods == {}
    assert params == load_params(file("partition: {kind: dirichlet}"))


def test_all_clients_may_take_part_in_a_round(file):
    assert (
        load_params(file("federation: {clients_per_round: 7}\npartition: {clients: 7}")).federation.clients_per_round
        == 7
    )


def test_byte_order_mark_and_windows_line_ends_change_nothing(file):
    assert load_params(file(b"\xef\xbb\xbffederation:\r\n  rounds: 3\r\n")).federation.rounds == 3
    assert refusal(file(b"\xef\xbb\xbfdevice: cpu\r\nfederation:\r\n  rounds: 0\r\n")).startswith("params.yaml:3: ")


def test_settings_are_those_of_the_chosen_plugin_and_its_siblings_keys_lie_dormant(file):
    path = file("partition: {kind: iid, clients: 4, alpha: -1}")
    assert load_params(path).partition == load_params(path, ["partition={kind: iid, clients: 4}"]).partition
    assert load_params(path).partition.rest == "deal"
    assert refusal(path, "partition.kind=shards") == "params.yaml:1: partition.alpha is -1; it must be greater than 0."
    assert load_params(path, ["partition.kind=shards", "partition.alpha=3"]).partition.alpha == 3


@pytest.mark.parametrize(
    ("written", "value"), [("1e-3", 0.001), ("1E2", 100.0), (".5", 0.5), ("7", 7.0), ("0x10", 16.0)]
)
def test_numbers_are_those_of_yaml_1_2(file, written, value):
    assert load_params(file(f"optimizer: {{lr: {written}}}")).optimizer.lr == value


@pytest.mark.parametrize("word", ["no", "on", "2026-01-01", "1:30", "1_000", "<<", "="])
def test_words_of_yaml_1_2_stay_words(file, word):
    assert load_params(file(f"tracking:\n  experiment: {word}\n")).tracking.experiment == word


def test_anchors_are_read(file):
    params = load_params(file("federation: {rounds: &n 4}\nstream: {tasks: *n}\n"))
    assert (params.federation.rounds, params.stream.tasks) == (4, 4)


def test_a_bomb_of_anchors_is_refused(file):
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert refusal(file("\n".join(["a0: &a0 x", *levels]))).endswith(
        "more than 10,000 values or 20 levels, too many for settings."
    )


@pytest.mark.parametrize("content", ["a: " + "[" * 5000, "a: " + "{b: " * 5000, "- " * 5000])
def test_deep_nesting_is_refused(file, content):
    assert refusal(file(content)).endswith(": more than 20 levels.")
    assert refusal(file(""), ".".join("a" * 5000) + "=1").endswith("as in --set federation.rounds=3.")


def test_an_alias_of_itself_is_refused(file):
    assert refusal(file("device: &a [*a]")).endswith("more than 10,000 values or 20 levels, too many for settings.")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("federation.rounds=3", 3),
        ("federation.rounds=[3, 4]", (3, 4)),
        (" federation.rounds = 3 ", 3),
        ("federation={rounds: 3}", 3),
    ],
)
def test_an_override_is_read_as_yaml(file, override, value):
    assert load_params(file("federation: {rounds: 7}"), [override]).federation.rounds == value


def test_an_override_can_be_null_and_the_last_one_wins(file):
    path = file("federation: {clients_per_round: 7}\npartition:\n")
    assert load_params(path, ["federation.clients_per_round=null"]).federation.clients_per_round is None
    assert load_params(path, ["partition.clients=9", "partition.clients=8"]).partition.clients == 8
    assert load_params(path, ["tracking.uri=http://host:5000/?a=b"]).tracking.uri == "http://host:5000/?a=b"


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.lists(st.integers(-1, 3), max_size=3)
)


@settings(deadline=None)
@given(st.sampled_from(["federation.rounds", "optimizer.lr", "data.mean", "tracking.uri", "partition.alpha"]), VALUES)
def test_an_override_is_as_good_as_the_file(tmp_path_factory, path, value):
    """Both give the same settings, or the same complaint."""
    block, key = path.split(".")
    text = json.dumps(value)
    file = tmp_path_factory.getbasetemp() / "as_good.yaml"

    def outcome(content: str, *overrides: str) -> object:
        file.write_text(content)
        try:
            return load_params(file, overrides)
        except UserError as error:
            return str(error).partition(": ")[2]

    assert outcome(f"{block}: {{{key}: {text}}}") == outcome("device: cpu\n", "device=auto", f"{path}={text}")


EXAMPLE = """
partition:
  kind: iid
  clients: 10 # ten
federation: {rounds: [1, 2], clients_per_round: ~}
methods:
  fedprox: &a
    mu: 1e-2
"""
PIECES = [
    *"{}[]:,-?!&*#|>%@'\"\\ \n\t=~<.",
    *EXAMPLE.split(),
    "\n  ",
    "---",
    "...",
    "!!int",
    "\\U",
    "\x85",
    "\ud7ff",
    "é",
]


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=80),
        st.lists(st.sampled_from(PIECES), max_size=25).map(lambda pieces: "".join(pieces).encode()),
        st.tuples(st.integers(0, len(EXAMPLE)), st.integers(0, 5), st.sampled_from(PIECES)).map(
            lambda cut: (EXAMPLE[: cut[0]] + cut[2] + EXAMPLE[cut[0] + cut[1] :]).encode()
        ),
    ),
    st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), max_size=1),
)
def test_whatever_the_file_holds_the_answer_is_settings_or_clear_lines(tmp_path_factory, content, overrides):
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_bytes(content)
    try:
        load_params(file, overrides)
    except UserError as error:
        for line in str(error).split("\n"):
            assert line.startswith((str(file), "--set "))
            assert len(line.splitlines()) == 1


def test_a_method_has_what_its_block_says_or_the_defaults(file):
    params = load_params(file("methods: {fedprox: {mu: 2}, fedavg: }"))
    assert load_method_settings(params, "fedprox").mu == 2
    assert load_method_settings(load_params(file("")), "fedprox").mu == 0.01
    assert load_method_settings(params, "fedavg").model_dump() == {}
    with pytest.raises(UserError, match=r"^fedprux is not a method\. Did you mean fedprox\?$"):
        load_method_settings(params, "fedprux")


RICH = "partition: {kind: iid, clients: 4, alpha: 3}\nfederation: {rounds: [1, 2]}\nmethods: {fedprox: {mu: 2}}\n"


def test_effective_settings_written_to_a_file_load_again(file):
    before = collect_settings(load_params(file(RICH)), "fedprox")
    assert before["methods"] == {"fedprox": {"mu": 2.0}}
    assert before["partition"]["rest"] == "deal"
    assert "alpha" not in before["partition"]
    assert before["federation"]["rounds"] == [1, 2]
    assert json.loads(json.dumps(before, allow_nan=False)) == before
    assert collect_settings(load_params(file(yaml.safe_dump(before))), "fedprox") == before


@pytest.mark.parametrize(
    "override", ["experiment.seeds=[7]", "experiment.methods=[fedavg]", "tracking.uri=x", "methods.fedprox.mu=9"]
)
def test_what_is_no_matter_of_a_run_leaves_its_settings_alone(file, override):
    path = file(RICH)
    assert collect_settings(load_params(path, [override]), "fedavg") == collect_settings(load_params(path), "fedavg")


@pytest.mark.parametrize("override", ["methods.fedprox.mu=9", "partition.rest=drop", "device=cpu", "optimizer.lr=1"])
def test_what_is_a_matter_of_a_run_changes_its_settings(file, override):
    path = file(RICH)
    assert collect_settings(load_params(path, [override]), "fedprox") != collect_settings(load_params(path), "fedprox")


def test_flat_settings_have_dotted_keys_and_plain_values():
    assert flatten_settings({"a": {"b": {"c": 1, "d": None}, "e": [1, "x"]}, "f": "g", "h": {}}) == {
        "a.b.c": 1,
        "a.b.d": None,
        "a.e": '[1, "x"]',
        "f": "g",
    }


def test_reading_settings_by_itself_imports_no_torch():
    code = "import sys, fclmodels.settings.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[3]).returncode == 0


def test_settings_for_one_method_alone_hold_for_it_alone_and_under_overrides(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(
        "optimizer: {lr: 0.5}\n"
        "methods:\n"
        "  fedprox: {mu: 0.2, only: {optimizer: {kind: adam, lr: 0.01}, model: {backbone: resnet}}}\n"
        "  fedavg: {}\n"
    )
    of_prox, of_avg = load_params(file, method="fedprox"), load_params(file, method="fedavg")
    assert (of_prox.optimizer.kind, of_prox.optimizer.lr, of_prox.model.backbone) == ("adam", 0.01, "resnet")
    assert (of_avg.optimizer.kind, of_avg.optimizer.lr, of_avg.model.backbone) == ("sgd", 0.5, "cnn")
    assert collect_settings(of_prox, "fedprox")["methods"]["fedprox"].keys().isdisjoint({"only"})
    assert load_params(file, ["optimizer.lr=0.1"], "fedprox").optimizer.lr == 0.1


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("{optimizer: {kid: adam}}", "params.yaml:2: optimizer.kid is not a setting. Did you mean optimizer.kind?"),
        ("3", "params.yaml:2: methods.fedprox.only is 3; it must be a block of settings."),
    ],
)
def test_a_mistake_in_settings_for_one_method_alone_is_named_where_it_is(
    only: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "params.yaml").write_text(f"methods:\n  fedprox: {{only: {only}}}\n")
    with pytest.raises(UserError, match=re.escape(message)):
        load_params(tmp_path / "params.yaml", method="fedprox")
