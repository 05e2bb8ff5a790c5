"""The arrows between modules point down only, and a few things are imported nowhere.

The checks are functions over source text, so that each is shown here to fail on a small wrong source before it is
trusted with the repository. Imports inside functions and under `TYPE_CHECKING` are arrows too; so are
`import_module("name")` and `__import__("name")` with a literal name, which a lazy public face uses.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("strawq", "strawq_workers")
PYTHON_TREES = (*PRODUCT, "tests", "tools")
TEXT_TREES = (*PYTHON_TREES, "docs", "contracts", ".ci")

BOTTOM, DATA, CORE, STORAGE, FACE, WORKERS, CLI = "bottom", "data", "core", "storage", "public face", "workers", "cli"
BOTTOM_MODULES = ("strawq.errors", "strawq.limits", "strawq.model", "strawq.version")
# Groups in memory: what storage writes and users hold. The state machine never sees one.
DATA_MODULES = ("strawq.alignment", "strawq.json_values", "strawq.rows", "strawq.samples")
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    BOTTOM: frozenset({BOTTOM}),
    DATA: frozenset({BOTTOM, DATA}),
    CORE: frozenset({BOTTOM, CORE}),
    STORAGE: frozenset({BOTTOM, DATA, STORAGE}),
    FACE: frozenset({BOTTOM, DATA, CORE, STORAGE, FACE}),
    WORKERS: frozenset({BOTTOM, DATA, FACE, WORKERS}),
    CLI: frozenset({BOTTOM, DATA, CORE, STORAGE, FACE, WORKERS, CLI}),
}
# (importing module, imported module) -> why this one arrow is let through.
ARROW_EXCEPTIONS: Mapping[tuple[str, str], str] = {}

# Core decides from its arguments alone: whatever asks the machine, the clock or chance is out of reach there.
IMPURE = frozenset(
    {
        "asyncio",
        "concurrent",
        "datetime",
        "fcntl",
        "glob",
        "importlib",
        "io",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
    }
    | {
        "random",
        "secrets",
        "select",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "uuid",
    }
)
UNSAFE_FORMATS = frozenset({"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})
OPTIONAL = frozenset({"ray", "sglang", "torch"})
# Scripts that run in the engine's own environment, and have no other use: there the engine's packages are a given.
ENGINE_SCRIPTS = "tools.sglang_cpu."
HEAVY = ("aiohttp", "numpy", "pyarrow", "ray", "safetensors", "sglang", "torch")

LINES_MAX, LINES_HARD_MAX = 400, 450
# path -> why this module is better in one piece than in two.
LONG_MODULES: Mapping[str, str] = {}

# Spelt in pieces, so that this file passes its own check.
PATHS_OF_ONE_MACHINE = ("/".join(("..", "shared")), "/".join(("", "work", "")))
CACHES = frozenset({"__pycache__", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"})


class Arrow(NamedTuple):
    """One import: the module named, the line it stands on, and whether it runs when the module is loaded."""

    target: str
    line: int
    at_load: bool


def imports(source: str, module: str, is_package: bool = False, known: frozenset[str] = frozenset()) -> list[Arrow]:
    """Every import of `module`. `from a import b` names `a.b` where that is a `known` module, else `a`."""
    return list(_walk(ast.parse(source), module if is_package else module.rpartition(".")[0], known, True))


def _walk(node: ast.AST, package: str, known: frozenset[str], at_load: bool) -> Iterator[Arrow]:
    if isinstance(node, ast.Import):
        yield from (Arrow(alias.name, node.lineno, at_load) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield Arrow(inner if inner in known else base, node.lineno, at_load)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.args[0].value
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and isinstance(name, str):
            relative = name.startswith(".")
            yield Arrow(f"{package}{name}" if relative else name, node.lineno, at_load)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        for guarded in node.body:
            yield from _walk(guarded, package, known, False)
        for other in node.orelse:
            yield from _walk(other, package, known, at_load)
        return
    inside = at_load and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, known, inside)


def layer(module: str) -> str | None:
    """The layer of one of our modules; None for anybody else's."""

    def within(*names: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in names)

    for name, roots in (
        (BOTTOM, BOTTOM_MODULES),
        (DATA, DATA_MODULES),
        (CORE, ("strawq.core",)),
        (STORAGE, ("strawq.storage",)),
        (CLI, ("strawq.cli", "strawq.__main__")),
        (FACE, ("strawq",)),
        (WORKERS, ("strawq_workers",)),
    ):
        if within(*roots):
            return name
    return None


def wrong_arrows(
    module: str, arrows: Iterable[Arrow], exceptions: Mapping[tuple[str, str], str] = ARROW_EXCEPTIONS
) -> list[str]:
    """Imports of our own modules that point up or sideways, and what core may not reach at all."""
    own = layer(module)
    assert own is not None, f"{module} is in no layer"
    faults = []
    for target, line, _ in arrows:
        other = layer(target)
        if other is not None and other not in MAY_IMPORT[own] and (module, target) not in exceptions:
            faults.append(f"{module}:{line} ({own}) imports {target} ({other})")
        if own == CORE and target.partition(".")[0] in IMPURE:
            faults.append(f"{module}:{line} (core, which is pure) imports {target}")
    return faults


def impure_calls(module: str, source: str) -> list[str]:
    """Built-in ways out of a pure module that need no import."""
    names = {"open", "input", "__import__"}
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        f"{module}:{call.lineno} (core, which is pure) calls {call.func.id}"
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in names
    ]


def unsafe_formats(module: str, source: str, arrows: Iterable[Arrow]) -> list[str]:
    """Formats that run code when they are read, imported or switched on by `allow_pickle`."""
    faults = [f"{module}:{a.line} imports {a.target}" for a in arrows if a.target.partition(".")[0] in UNSAFE_FORMATS]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            off = isinstance(node.value, ast.Constant) and node.value.value is False
            faults += [] if off else [f"{module}:{node.value.lineno} may allow pickles"]
    return faults


def eager_extras(module: str, arrows: Iterable[Arrow]) -> list[str]:
    """Extras imported when the module is loaded: without the extra the module could not even be named."""
    return [
        f"{module}:{a.line} imports {a.target} at module level"
        for a in arrows
        if a.at_load and a.target.partition(".")[0] in OPTIONAL and not module.startswith(ENGINE_SCRIPTS)
    ]


def long_modules(line_counts: Mapping[str, int], allowed: Mapping[str, str]) -> list[str]:
    """Modules past the limit and not excused, past the hard limit, or excused for nothing."""
    faults = []
    for path, lines in line_counts.items():
        if lines > LINES_HARD_MAX:
            faults.append(f"{path} has {lines} lines; no reason excuses more than {LINES_HARD_MAX}")
        elif lines > LINES_MAX and not allowed.get(path, "").strip():
            faults.append(f"{path} has {lines} lines, over {LINES_MAX}: divide it, or give a reason in LONG_MODULES")
    stale = [path for path in allowed if line_counts.get(path, 0) <= LINES_MAX]
    return faults + [f"LONG_MODULES excuses {path}, which no longer needs it" for path in stale]


def paths_of_one_machine(name: str, data: bytes) -> list[str]:
    """Places that exist only where the file was written."""
    return [f"{name} names {place}" for place in PATHS_OF_ONE_MACHINE if place.encode() in data]


def loaded_by(module: str, names: Sequence[str], directory: Path) -> list[str]:
    """Which of `names` a fresh interpreter has loaded after importing `module` with `directory` first on its path."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); __import__(sys.argv[2]); "
        "print(*(name for name in sys.argv[3:] if name in sys.modules))"
    )
    # -I and an explicit path: what is measured is this tree, not an installed copy or what PYTHONPATH names.
    command = [sys.executable, "-I", "-c", code, str(directory), module, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# ---- the repository ----


def python_files(*trees: str) -> list[Path]:
    found = [path for tree in trees for path in sorted((ROOT / tree).rglob("*.py"))]
    return [path for path in found if CACHES.isdisjoint(path.parts)]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Module(NamedTuple):
    name: str
    source: str
    arrows: list[Arrow]


def modules(*trees: str) -> list[Module]:
    paths = python_files(*trees)
    known = frozenset(map(module_name, paths))
    found = []
    for path in paths:
        source, name = path.read_text(encoding="utf-8"), module_name(path)
        found.append(Module(name, source, imports(source, name, path.name == "__init__.py", known)))
    assert found, f"no Python file under {trees}: the check would pass on nothing"
    return found


def test_arrows_point_down_only() -> None:
    assert [fault for m in modules(*PRODUCT) for fault in wrong_arrows(m.name, m.arrows)] == []


def test_every_arrow_exception_is_used_and_reasoned() -> None:
    used = {(m.name, a.target) for m in modules(*PRODUCT) for a in m.arrows}
    assert [pair for pair, reason in ARROW_EXCEPTIONS.items() if pair not in used or not reason.strip()] == []


def test_core_opens_nothing_without_an_import() -> None:
    core = [m for m in modules("strawq") if layer(m.name) == CORE]
    assert [fault for m in core for fault in impure_calls(m.name, m.source)] == []


def test_no_format_that_runs_code_when_read() -> None:
    assert [fault for m in modules(*PYTHON_TREES) for fault in unsafe_formats(m.name, m.source, m.arrows)] == []


def test_extras_are_imported_lazily() -> None:
    assert [fault for m in modules(*PYTHON_TREES) for fault in eager_extras(m.name, m.arrows)] == []


def test_modules_stay_short() -> None:
    paths = python_files(*PRODUCT, "tools")
    counts = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in paths}
    assert long_modules(counts, LONG_MODULES) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    files = [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml") or path.name == "Makefile"]
    files += [path for tree in TEXT_TREES for path in (ROOT / tree).rglob("*") if CACHES.isdisjoint(path.parts)]
    read = [(str(path.relative_to(ROOT)), path.read_bytes()) for path in files if path.is_file()]
    assert "Makefile" in dict(read)
    assert [fault for name, data in read for fault in paths_of_one_machine(name, data)] == []


def test_the_command_line_starts_without_heavy_modules() -> None:
    if not (ROOT / "strawq/cli/__init__.py").exists() and not (ROOT / "strawq/cli.py").exists():
        pytest.skip("there is no strawq.cli yet")
    assert loaded_by("strawq.cli", HEAVY, ROOT) == []


# ---- the checks themselves, on sources that are wrong ----


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("strawq.model", "import strawq", "imports strawq (public face)"),
        ("strawq.errors", "from strawq.core import decide", "imports strawq.core"),
        ("strawq.limits", "from .storage import log", "imports strawq.storage"),
        ("strawq.core.decide", "from strawq.storage import log", "imports strawq.storage"),
        ("strawq.core.decide", "from ..storage.log import head", "imports strawq.storage.log"),
        ("strawq.core.decide", "from strawq import pool", "imports strawq.pool (public face)"),
        ("strawq.core.decide", "import os.path", "imports os.path"),
        ("strawq.core.decide", "from time import monotonic", "imports time"),
        ("strawq.core.decide", "def f():\n    import random", "imports random"),
        ("strawq.core.decide", "if TYPE_CHECKING:\n    from pathlib import Path", "imports pathlib"),
        ("strawq.storage.log", "from strawq.core.apply import apply", "imports strawq.core.apply"),
        ("strawq.storage.log", "def f():\n    from strawq.pool import Pool", "imports strawq.pool"),
        ("strawq.pool", "import strawq_workers.loop", "imports strawq_workers.loop (workers)"),
        ("strawq.pool", "from strawq.cli import main", "imports strawq.cli (cli)"),
        ("strawq", "import_module('strawq.cli')", "imports strawq.cli (cli)"),
        ("strawq", "importlib.import_module('.cli', __name__)", "imports strawq.cli (cli)"),
        ("strawq_workers.loop", "from strawq.core import decide", "imports strawq.core"),
        ("strawq_workers.loop", "from strawq.storage.packs import Pack", "imports strawq.storage.packs"),
        ("strawq_workers.loop", "try:\n    import strawq.cli\nexcept ImportError: raise", "imports strawq.cli"),
    ],
)
def test_an_arrow_that_points_up_is_found(module: str, source: str, fault: str) -> None:
    known = frozenset({"strawq.pool", "strawq.cli"})
    faults = wrong_arrows(module, imports(source, module, is_package=module == "strawq", known=known))
    assert len(faults) == 1
    assert fault in faults[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("strawq.model", "from strawq.errors import InputError\nfrom . import limits"),
        ("strawq.core.decide", "import enum, msgspec\nfrom strawq import model\nfrom .apply import apply"),
        ("strawq.storage.log", "import os, time\nfrom ..errors import Damaged\nfrom strawq.storage import files"),
        ("strawq.pool", "import strawq.core.decide, strawq.storage.log, strawq.queue"),
        ("strawq_workers.loop", "from strawq import Pool\nfrom strawq.queue import Queue\nimport strawq.errors"),
        ("strawq.cli.main", "from strawq.core import decide\nfrom strawq.storage import log\nimport strawq_workers"),
        ("strawq.__main__", "from strawq.cli import main"),
    ],
)
def test_an_arrow_that_points_down_is_let_through(module: str, source: str) -> None:
    known = frozenset({"strawq.model", "strawq.limits"})
    assert wrong_arrows(module, imports(source, module, known=known)) == []


def test_an_exception_lets_one_arrow_through_and_no_other() -> None:
    arrows = imports("import strawq.storage.packs\nimport strawq.storage.log", "strawq_workers.loop")
    faults = wrong_arrows("strawq_workers.loop", arrows, {("strawq_workers.loop", "strawq.storage.packs"): "rows"})
    assert len(faults) == 1
    assert "strawq.storage.log" in faults[0]


@pytest.mark.parametrize("source", ["open('x')", "def f():\n    return open('x').read()", "__import__('o' + 's')"])
def test_a_way_out_of_core_without_an_import_is_found(source: str) -> None:
    assert len(impure_calls("strawq.core.decide", source)) == 1
    assert impure_calls("strawq.core.decide", "pool.open('x')\nopened = reopen(1)") == []


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from marshal import loads", "def f():\n    import dill", "import_module('shelve')",
     "np.load(f, allow_pickle=True)", "np.load(f, allow_pickle=trusted)"],
)  # fmt: skip
def test_a_format_that_runs_code_is_found(source: str) -> None:
    assert len(unsafe_formats("tools.bench", source, imports(source, "tools.bench"))) == 1
    assert unsafe_formats("tools.bench", "np.load(f, allow_pickle=False)", imports("import json", "tools.bench")) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch", True),
        ("from sglang.srt import server", True),
        ("class A:\n    import ray", True),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", True),
        ("if TYPE_CHECKING:\n    import json\nelse:\n    import torch", True),
        ("def f():\n    import torch", False),
        ("async def f():\n    from ray import get", False),
        ("if TYPE_CHECKING:\n    import torch", False),
        ("if typing.TYPE_CHECKING:\n    import torch", False),
        ("import torchlike, raysomething", False),
    ],
)
def test_an_extra_imported_at_module_level_is_found(source: str, found: bool) -> None:
    arrows = imports(source, "strawq.tensors")
    assert bool(eager_extras("strawq.tensors", arrows)) is found
    assert eager_extras("tools.sglang_cpu.make_models", arrows) == []


def test_a_long_module_and_a_stale_excuse_are_found() -> None:
    counts = {"a.py": LINES_MAX, "b.py": LINES_MAX + 1, "c.py": LINES_HARD_MAX + 1, "d.py": 10}
    assert [f.split()[0] for f in long_modules(counts, {})] == ["b.py", "c.py"]
    assert [f.split()[0] for f in long_modules(counts, {"b.py": "a table", "c.py": "a table"})] == ["c.py"]
    assert [f.split()[0] for f in long_modules(counts, {"b.py": " "})] == ["b.py", "c.py"]
    assert any("d.py" in f for f in long_modules(counts, {"b.py": "a table", "d.py": "a table", "c.py": "x"}))


def test_a_path_of_one_machine_is_found() -> None:
    for place in PATHS_OF_ONE_MACHINE:
        assert len(paths_of_one_machine("notes.md", f"see {place}x".encode())) == 1
    assert paths_of_one_machine("notes.md", b"a shared mount; workers/loop.py") == []


def test_a_heavy_module_behind_an_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "heavy_one.py").write_text("")
    (tmp_path / "face.py").write_text("def run():\n    import heavy_one\n")
    (tmp_path / "eager.py").write_text("import face\nface.run()\n")
    assert loaded_by("face", ["heavy_one", "heavy_two"], tmp_path) == []
    assert loaded_by("eager", ["heavy_one", "heavy_two"], tmp_path) == ["heavy_one"]
