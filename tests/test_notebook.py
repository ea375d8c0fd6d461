"""notebooks/colab_tpu.ipynb runs from top to bottom, on CPU; what is committed has no outputs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "colab_tpu.ipynb"
MOST_SECONDS = 180
NEEDED = ("nbclient", "nbformat", "ipykernel", "matplotlib")


def test_the_committed_notebook_is_stripped():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), cell["id"]


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel of this interpreter, in folders that nothing else knows."""
    for module in NEEDED:
        pytest.importorskip(module, reason=f"{module} is missing: pip install '.[notebook]'")
    from ipykernel.kernelspec import write_kernel_spec

    write_kernel_spec(tmp_path / "jupyter" / "kernels" / "this-python")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return "this-python"


@pytest.mark.real
def test_real_notebook(kernel, tmp_path):
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook,
        kernel_name=kernel,
        timeout=MOST_SECONDS,
        resources={"metadata": {"path": str(tmp_path)}},  # the kernel's folder: the checkout is not in reach
    )
    started = time.monotonic()
    client.execute()  # raises what a cell raises
    seconds = time.monotonic() - started

    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    assert any("image/png" in output.get("data", {}) for output in outputs["histogram"])
    assert "tokens per row and step" in printed(outputs["greedy"])
    assert "follows the law of plain sampling" in printed(outputs["sampled"])
    assert "equal those of generate" in printed(outputs["decode"])
    assert seconds < MOST_SECONDS


def printed(outputs) -> str:
    return "".join(output.get("text", "") for output in outputs)
