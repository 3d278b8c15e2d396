"""Nothing that arrives from a socket or from Redis can become code: no such call stands anywhere in the product."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.schemas.errors import DecodeError, EncodeError
from headrace.schemas.wire import ALLOWED_DTYPES, MessageKind, decode, encode

FOLDERS = ("schemas", "broker", "workers", "learner_stub", "deploy")
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
    "yaml",
    "xmlrpc",
}
CALLS = {
    *("eval", "exec", "compile", "__import__", "torch.load", "torch.save", "torch.jit.load", "torch.package"),
    *("np.load", "numpy.load", "np.save", "np.savez", "np.fromfile", "np.memmap", "send_pyobj", "recv_pyobj"),
    *("pandas.read_pickle", "multiprocessing.Pipe", "multiprocessing.Queue", "os.system", "os.popen"),
}
IMPORTERS = {
    "schemas/plugins.py": "names from the user's config",
    "workers/envs/creators.py": "the env as the user's config names it",
    "workers/modules/protocol.py": "the module as the user's config names it",
    "workers/__init__.py": "its own public names, loaded when asked for",
    "learner_stub/__init__.py": "its own public names, loaded when asked for",
    "deploy/doctor.py": "the names of our dependencies",
}
"""The files that turn a name into code, and where the name is from."""


def _files(root: Path) -> list[Path]:
    return [path for name in FOLDERS for path in sorted((root / name).rglob("*.py"))]


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(source: str, may_import: bool = False) -> Iterator[str]:
    """What in `source` could turn bytes into code, as "line: what"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"{node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES)
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in CALLS or name.split(".")[-1] in ("send_pyobj", "recv_pyobj"):
                yield f"{node.lineno}: {name}()"
            if not may_import and name.split(".")[-1] in ("import_module", "run_module", "run_path"):
                yield f"{node.lineno}: {name}()"
            if any(k.arg == "allow_pickle" and not _is(k.value, False) for k in node.keywords):
                yield f"{node.lineno}: allow_pickle"
            if any(k.arg == "shell" and not _is(k.value, False) for k in node.keywords):
                yield f"{node.lineno}: shell"
            if any(
                _is_object_dtype(value) for value in [*node.args, *(k.value for k in node.keywords if k.arg == "dtype")]
            ):
                yield f"{node.lineno}: object dtype"


def _is(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_object_dtype(node: ast.AST) -> bool:
    return _dotted(node) in ("object", "np.object_", "numpy.object_") or (
        isinstance(node, ast.Constant) and node.value in ("O", "|O")
    )


def test_no_product_file_can_turn_bytes_into_code(root: Path) -> None:
    found = {
        f"{path.relative_to(root)}:{offence}"
        for path in _files(root)
        for offence in offences(path.read_text(), path.relative_to(root).as_posix() in IMPORTERS)
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing.reduction import x\nimport dill.source",
        "def f():\n    from cloudpickle import loads",
        "eval('1')",
        "torch.load(path)",
        "np.load(path)",
        "thing.load(path, allow_pickle=True)",
        "np.array(x, dtype=object)",
        "np.empty(3, object)",
        "np.zeros(3, 'O')",
        "socket.recv_pyobj()",
        "import importlib\nimportlib.import_module(header['module'])",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_scan_itself_sees_what_it_should(source: str) -> None:
    assert list(offences(source))


def test_the_scan_covers_every_folder(root: Path) -> None:
    assert {path.relative_to(root).parts[0] for path in _files(root)} == set(FOLDERS)


def test_names_become_code_only_where_config_is_read(root: Path) -> None:
    """Whoever calls `load_object` says by `key` which setting the name is from."""
    for path in _files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _dotted(node.func).endswith("load_object"):
                assert len(node.args) + len(node.keywords) == 2, f"{path}:{node.lineno}"


def test_object_arrays_are_refused_at_both_ends() -> None:
    with pytest.raises(EncodeError, match="object"):
        encode(MessageKind.BATCH, {}, {"x": np.array([print])})
    frames = encode(MessageKind.BATCH, {}, {"x": np.zeros(1)})
    for dtype in ("|O", "|V8", "<U2", "|S8", "<M8[s]", "O"):
        assert dtype not in ALLOWED_DTYPES
        body = bytes(frames[1]).replace(b'"<f8"', f'"{dtype}"'.encode())
        with pytest.raises(DecodeError):
            decode([frames[0], body, *frames[2:]])
