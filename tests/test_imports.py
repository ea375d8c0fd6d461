"""Imports point downwards: the table of docs/architecture.md, held against the code."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
GROUPS = [  # from bottom to top; the first prefix that fits a module is its group
    ("pallas_kernels",),
    (
        "sv_jax.config",
        "sv_jax.sampling_params",
        "sv_jax.sharding",
        "sv_jax.sparsity.config",
        "sv_jax.sparsity.ffn_config",
    ),
    ("sv_jax.model",),
    ("sv_jax.sparsity",),
    ("sv_jax.speculation",),
    ("sv_jax.drafts",),
    ("sv_jax.checkpoints",),
    ("sv_jax.engine",),
    ("sv_jax.planning",),
    ("sv_jax.ahead_of_time",),
    ("sv_jax.evaluation",),
    ("sv_jax",),
]


def level(module: str) -> int | None:
    for index, prefixes in enumerate(GROUPS):
        if any(module == p or module.startswith(p + ".") for p in prefixes):
            return index
    return None


def imported_modules(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            # `from package import name`: the name may itself be a module.
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def upward_imports(sources: dict[str, list[str]]) -> list[str]:
    found = []
    for module, names in sources.items():
        own = level(module)
        for name in names:
            target = level(name)
            if own is not None and target is not None and target > own:
                found.append(f"{module} imports {name}")
    return found


def test_imports_point_downwards():
    sources = {}
    for package in ("sv_jax", "pallas_kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            sources[module.removesuffix(".__init__")] = imported_modules(path)
    assert len(sources) > 20
    assert upward_imports(sources) == []


def test_an_upward_import_is_found():
    assert upward_imports({"sv_jax.model.cache": ["sv_jax.speculation.types.Draft"]})
