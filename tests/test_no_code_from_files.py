"""Nothing is unpickled and no text is run as code: what could do either is called nowhere, or where ALLOWED says why.

Workers of a run get JSON lines and raw tensors (federation/messages.py): not even a process pool is needed, which would
unpickle what it is sent. What libraries do by themselves stands in SECURITY.md.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(file for top in ("fclmodels", "flows", "tasks", "bench", "docs") for file in (ROOT / top).rglob("*.py"))
MODULES = {
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "pickletools",
    "code",
    "codeop",
    "multiprocessing",
}
ARCHIVES = {"tarfile", "zipfile"}
CALLS = {
    *("eval", "exec", "compile", "__import__", "input"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("asyncio.create_subprocess_shell", "shutil.unpack_archive", "torch.jit.load"),
}
READERS = {  # a reader that can run code, and what keeps it from that
    "torch.load": ("weights_only", True),
    "from_pretrained": ("trust_remote_code", False),
    "torch.hub.load": ("trust_repo", "check"),
}
OWN_WORKERS = "a measurement's own worker processes get its own settings"
ALLOWED = {"bench": {"multiprocessing": OWN_WORKERS, "ProcessPoolExecutor": OWN_WORKERS}}  # folder, name, reason


def imported(tree: ast.AST) -> dict[str, str]:
    """What names stand for: of `import torch as t` t is torch, of `from torch import load` load is torch.load."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def name_of(node: ast.expr, names: dict[str, str]) -> str:
    """`a.b.c` of a call's function, `?.c` where it stands on no name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"]))


def given_to(call: ast.Call, name: str) -> dict[str | None, ast.expr]:
    """Arguments by name; of those by position the one that matters here."""
    third = {"allow_pickle": call.args[2]} if name == "numpy.load" and len(call.args) > 2 else {}
    return {**third, **{word.arg: word.value for word in call.keywords}}


def found_in(code: str) -> Iterator[str]:
    tree = ast.parse(code)
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (name for name in of if name.partition(".")[0] in MODULES | ARCHIVES)
            yield from (alias.name for alias in node.names if alias.name == "ProcessPoolExecutor")
        elif isinstance(node, ast.Call):
            name = name_of(node.func, names)
            given = given_to(node, name)
            values = {word: value.value for word, value in given.items() if isinstance(value, ast.Constant)}
            if name in CALLS or values.get("shell") or ("shell" in given and "shell" not in values):
                yield name or "shell"
            elif "allow_pickle" in given and values.get("allow_pickle") is not False:
                yield f"{name}(allow_pickle)"
            elif name.startswith("yaml.") and name.partition(".")[2].startswith(("load", "unsafe", "full")):
                yield name
            for reader, (word, right) in READERS.items():
                if (name == reader or name.endswith(f".{reader}")) and values.get(word, "absent") != right:
                    yield name
            if name.rpartition(".")[2] in ("read_pickle", "to_pickle", "loadmat", "import_module_from_string"):
                yield name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_is_unpickled_or_run(file: Path) -> None:
    allowed = ALLOWED.get(file.relative_to(ROOT).parts[0], {})
    assert {*found_in(file.read_text())} <= allowed.keys()


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "def f():\n    import dill.source",
        "import tarfile",
        "from concurrent.futures import ProcessPoolExecutor",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=kind)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=given)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "[eval][0](text) + eval(text)",
        "exec(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=given)",
        "pd.read_pickle(path)",
        "from torch import load\nload(path)",
        "import torch as t\nt.load(path)",
        "from torch import load as read\nread(path, weights_only=False)",
        "torch.jit.load(path)",
        "from torch import jit\njit.load(path)",
        "from yaml import load\nload(text, Loader)",
        "import yaml as y\ny.load(text, y.Loader)",
        "from os import system\nsystem(text)",
        "subprocess.getoutput(text)",
        "import numpy as np\nnp.load(path, None, True)",
        "asyncio.create_subprocess_shell(text)",
        "library.AutoModel.from_pretrained(folder)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=asked)",
    ],
)
def test_the_walk_sees_it(code: str) -> None:
    assert [*found_in(code)]


@pytest.mark.parametrize(
    "code",
    [
        "network.eval()",
        "build(spec).eval()",
        "torch.load(path, weights_only=True)",
        "np.load(path, mmap_mode='r')",
        "yaml.safe_load(text)",
        "from yaml import safe_load\nsafe_load(text)",
        "import re\nfrom re import compile\ncompile(text)",
        "import numpy as np\nnp.load(path, None, False)",
        "subprocess.run([git, 'status'], shell=False)",
        "AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)",
    ],
)
def test_the_walk_lets_pass_what_is_safe(code: str) -> None:
    assert [*found_in(code)] == []
