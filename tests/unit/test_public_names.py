"""What `import tensorferry` promises, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import tensorferry
from helpers.checkpoints import ar, write_safetensors
from tensorferry.core import Transform

PUBLIC = [
    # opening, planning, loading, converting, verifying
    "Conversion", "convert",
    "Checkpoint", "ReadOptions", "Reloader", "Report", "Strictness", "Verified", "load", "load_model",
    "open_checkpoint", "plan", "verify",
    # what a plan is made of, for models that declare their layout and names that differ
    "Box", "Catalogue", "Drop", "Feeder", "Ignore", "Join", "Layout", "Place", "Plan", "Region", "RuleSet", "Slot",
    "Split", "TensorEntry",
    "Add", "Chain", "Concat", "Custom", "Dequantize", "Part", "Permute", "Stack", "Take", "Transpose",
    # tensors whose blocks stay packed
    "PackedParameter", "PackedTensor", "keep_packed", "packed_types",
    # models with a loader of their own
    "stream_opaque", "trace",
    # the Model Loader face
    "BaseModelLoader", "DefaultModelLoader", "LoadConfig", "ModelConfig", "ParallelConfig", "get_model_loader",
    "register_model_loader", "save_sharded_state",
    # what can be wrong
    "AccessDenied", "ConfigError", "CorruptFile", "FinalizeError", "FormatError", "LocateError", "PlanError", "Problem",
    "ProblemKind", "ReadError", "RuleError", "TensorferryError", "UnknownFormat", "UnsafeFile", "UnsupportedDtype",
    "WriteError",
]  # fmt: skip


def in_a_child(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_these_names_are_public_and_no_others() -> None:
    assert sorted(tensorferry.__all__) == sorted(PUBLIC)


def test_dir_lists_the_public_names() -> None:
    assert dir(tensorferry) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(tensorferry, name)
    documentation = inspect.getdoc(value)
    assert documentation
    assert not documentation.startswith(f"{name}("), "that is what a dataclass says of itself when nobody does"


def public_methods() -> list[str]:
    return [
        f"{name}.{member}"
        for name in PUBLIC
        if inspect.isclass(kind := getattr(tensorferry, name)) and not issubclass(kind, BaseException)
        for member, value in vars(kind).items()
        if not member.startswith("_") and (callable(value) or isinstance(value, property | classmethod | staticmethod))
        if not isinstance(value, type)
        if not (hasattr(kind, "op") and hasattr(Transform, member))  # what all transforms do is said there
    ]


@pytest.mark.parametrize("path", public_methods())
def test_every_public_method_says_what_it_does(path: str) -> None:
    name, _, member = path.partition(".")
    assert inspect.getdoc(getattr(getattr(tensorferry, name), member))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_and_classes_are_annotated(name: str) -> None:
    value = getattr(tensorferry, name)
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_importing_tensorferry_imports_none_of_the_heavy_packages() -> None:
    heavy = {"torch", "numpy", "transformers", "huggingface_hub", "safetensors", "rich", "click"}
    assert in_a_child(f"import sys, tensorferry; print({heavy} & set(sys.modules))") == "set()\n"


def test_opening_a_checkpoint_imports_no_torch_and_reading_from_it_does(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})
    code = (
        "import sys, tensorferry\n"
        f"with tensorferry.open_checkpoint({str(file)!r}) as checkpoint:\n"
        "    print('torch' in sys.modules, list(checkpoint.catalogue))\n"
        "    print(checkpoint.read('w').tolist(), 'torch' in sys.modules)"
    )
    assert in_a_child(code) == "False ['w']\n[0.0, 1.0] True\n"


def test_functions_are_not_hidden_by_modules_of_the_same_name() -> None:
    code = (
        "import tensorferry, tensorferry.verify, tensorferry.api\n"
        "print(all(map(callable, (tensorferry.verify, tensorferry.load, tensorferry.plan))))"
    )
    assert in_a_child(code) == "True\n"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tensorferry' has no attribute 'lod'"):
        tensorferry.lod  # noqa: B018


def test_without_torch_what_needs_it_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import tensorferry\n"
        "try: tensorferry.load\n"
        "except ImportError as error: print(error.name, error)"
    )
    assert in_a_child(code) == "torch tensorferry.load needs torch: pip install 'tensorferry[torch]'\n"


def test_the_version_is_the_one_of_the_package() -> None:
    assert tensorferry.__version__ == version("tensorferry")
