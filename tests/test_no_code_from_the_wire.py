"""Nothing that arrives from a socket or from Redis can become code: no such call stands anywhere in the product."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.schemas.errors import DecodeError, EncodeError
from headrace.schemas.frames.wire import ALLOWED_DTYPES, MessageKind, decode, encode

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
LOADERS = {
    *(
        "import_module",
        "resolve_name",
        "run_module",
        "run_path",
        "find_loader",
        "exec_module",
        "spec_from_file_location",
    ),
    *("load_object", "load_factory", "build_piece", "build_connector", "find_creator", "gym_spec", "build_module"),
}
"""Functions that return code for a name: those of the standard library, and our own, which call them."""
CONFIG = "a name from the user's config or a flag"
NAMES_BECOME_CODE = {
    "schemas/settings/plugins.py": CONFIG,
    "workers/envs/creators.py": CONFIG,
    "workers/policy/module_protocol.py": CONFIG,
    "workers/__init__.py": "its own public names, loaded when asked for",
    "learner_stub/__init__.py": "its own public names, loaded when asked for",
    "deploy/loggers/logger_thread.py": CONFIG,
    "deploy/__init__.py": "its own public names, loaded when asked for",
    "deploy/root_package/__init__.py": "the public names of the whole package, loaded when asked for",
    "deploy/annexes/chaos/truth.py": CONFIG,
    "deploy/annexes/doctor/examination.py": "the names of our dependencies",
    "deploy/annexes/policies/episode_video.py": CONFIG,
    "deploy/annexes/recording/exporting.py": "its own table",
    "deploy/annexes/rerun/replay.py": CONFIG,
    "deploy/command/cli.py": "the tables of deploy/run/annexes.py",
    "deploy/run/annexes.py": "its own tables",
    "deploy/trained/policy_spaces.py": CONFIG,
    "deploy/annexes/doctor/start_check.py": CONFIG,
    "learner_stub/reference/policies.py": CONFIG,
    "learner_stub/rollouts/connector_merger.py": CONFIG,
    "learner_stub/streaming/stream.py": "its own table",
    "learner_stub/rollouts/module.py": CONFIG,
    "workers/callbacks.py": CONFIG,
    "workers/connectors/connector.py": CONFIG,
    "workers/connectors/pipeline.py": CONFIG,
    "workers/envs/driver.py": "the driver that the class of a user's env names",
    "workers/envs/inline.py": CONFIG,
    "workers/envs/native/creators.py": CONFIG,
    "workers/envs/process/process_envs.py": "the job that the worker gives the process it has started",
    "workers/envs/process/job_settings.py": CONFIG,
    "workers/external/lanes.py": CONFIG,
    "workers/policy/policies.py": CONFIG,
    "workers/trained/trained_policy.py": CONFIG,
    "workers/runner/env_runner.py": CONFIG,
    "workers/annex_parts.py": "its own table",
    "workers/sampling/opening.py": CONFIG,
    "workers/serving/served_env.py": CONFIG,
}
"""The files in which a name becomes code, by any of `LOADERS`, and where the name is from."""


ARRAY_FILES = {"deploy/annexes/ray/rllib_policy.py": "a file of arrays that the user's settings name"}
"""The files that read .npz files of numpy. Such a file may hold a pickle, which numpy reads only if it is allowed."""


def _files(root: Path) -> list[Path]:
    return [path for name in FOLDERS for path in sorted((root / name).rglob("*.py"))]


@functools.cache
def _nodes(source: str) -> list[ast.AST]:
    """Return all nodes of a source. They are cached, because three tests look at every file."""
    return list(ast.walk(ast.parse(source)))


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(source: str) -> Iterator[str]:
    """Yield the places in `source` that could turn bytes into code, as "line: what"."""
    for node in _nodes(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"{node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES)
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in CALLS or name.split(".")[-1] in ("send_pyobj", "recv_pyobj"):
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
    found = {(path, offence) for path in _files(root) for offence in offences(path.read_text())}
    of_arrays = {(root / name, call) for name in ARRAY_FILES for call in ("np.load()", "np.savez()")}
    assert not [f"{path}:{what}" for path, what in found if (path, what.partition(": ")[2]) not in of_arrays]


@pytest.mark.parametrize("name", ARRAY_FILES)
def test_a_file_of_arrays_is_read_without_pickles(root: Path, name: str) -> None:
    calls = [node for node in _nodes((root / name).read_text()) if isinstance(node, ast.Call)]
    reads = [call for call in calls if _dotted(call.func) == "np.load"]
    assert reads
    assert all(any(k.arg == "allow_pickle" and _is(k.value, False) for k in call.keywords) for call in reads)


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
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_scan_finds_each_construct_that_turns_bytes_into_code(source: str) -> None:
    assert list(offences(source))


def test_the_scan_covers_every_folder(root: Path) -> None:
    assert {path.relative_to(root).parts[0] for path in _files(root)} == set(FOLDERS)


def loads(source: str) -> set[str]:
    """Return those of `LOADERS` that `source` calls, imports or hands on, under any name."""
    found = set()
    for node in _nodes(source):
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(_dotted(node).split(".")[-1])
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name.split(".")[-1] for alias in node.names}
    return found & LOADERS


def test_names_become_code_only_in_the_listed_files(root: Path) -> None:
    """A place that is not listed is a new way to code: say where its names are from, or do without."""
    found = {path.relative_to(root).as_posix() for path in _files(root) if loads(path.read_text())}
    assert sorted(found - NAMES_BECOME_CODE.keys()) == []
    assert sorted(NAMES_BECOME_CODE.keys() - found) == [], "they load nothing any more"


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\nimportlib.import_module(header['module'])",
        "from importlib import import_module as load\nload(header['module'])",
        "from headrace.schemas.settings.plugins import load_object\nload_object(header['build'], 'build')",
        "from headrace.schemas import plugins\nmade = map(plugins.load_object, header['names'], keys)",
        "from headrace.workers.envs import creators\ncreators.find_creator(header['env'])",
    ],
)
def test_the_scan_sees_a_new_place_that_loads_names(source: str) -> None:
    assert loads(source)


def test_each_call_of_load_object_names_its_setting(root: Path) -> None:
    """The argument `key` names the setting, and errors show it."""
    calls = [
        (f"{path.relative_to(root)}:{node.lineno}", len(node.args) + len(node.keywords))
        for path in _files(root)
        for node in _nodes(path.read_text())
        if isinstance(node, ast.Call) and _dotted(node.func).endswith("load_object")
    ]
    assert calls
    assert [where for where, arguments in calls if arguments != 2] == []


def test_object_arrays_are_refused_at_both_ends() -> None:
    with pytest.raises(EncodeError, match="object"):
        encode(MessageKind.BATCH, {}, {"x": np.array([print])})
    frames = encode(MessageKind.BATCH, {}, {"x": np.zeros(1)})
    for dtype in ("|O", "|V8", "<U2", "|S8", "<M8[s]", "O"):
        assert dtype not in ALLOWED_DTYPES
        body = bytes(frames[1]).replace(b'"<f8"', f'"{dtype}"'.encode())
        with pytest.raises(DecodeError):
            decode([frames[0], body, *frames[2:]])
