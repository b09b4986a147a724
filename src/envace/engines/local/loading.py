"""Loads a policy: a Hugging Face model folder, a run, a GGUF file, or a policy that ships with EnvACE."""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from envace.errors import UserError

_log = logging.getLogger(__name__)


def resolve(model: str) -> Path:
    """The folder or file of ``model``: of a run its newest checkpoint, and a bare name is a shipped policy first.

    Raises:
        UserError: there is no such folder, file or shipped policy.
    """
    shipped = Path(str(resources.files("envace"))) / "policies"
    if "/" not in model and (shipped / model / "config.json").is_file():
        return shipped / model
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir():
        names = ", ".join(sorted(folder.name for folder in shipped.iterdir())) if shipped.is_dir() else "none"
        raise UserError(f"model {model!r}: no such folder or .gguf file, and no shipped policy of that name ({names})")
    checkpoints = [file.parent for file in path.glob("checkpoints/step-*/config.json")]
    if whole := [folder for folder in checkpoints if folder.suffix != ".partial"]:
        return max(whole, key=lambda folder: (len(folder.name), folder.name))
    if not (path / "config.json").is_file():
        raise UserError(f"model {model!r}: the folder has no config.json, so it is not a Hugging Face model")
    return path


def load_policy(model: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """The model (in evaluation mode) and its tokenizer.

    Raises:
        UserError: nothing there, or transformers cannot read it.
    """
    path = resolve(model)
    transformers_logging.disable_progress_bar()
    where: dict[str, Any] = {}
    folder = path
    if path.is_file():
        folder, where = path.parent, {"gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **where)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, **where
        )
    except Exception as error:  # a file that is cut off fails by whatever its reader stumbles on
        reason = str(error).splitlines()[:1] or [type(error).__name__]
        raise UserError(f"model {model!r}: transformers cannot load it: {reason[0]}") from None
    # transformers fills what the files lack with random numbers, and only warns.
    for what, names in (("lacks", report["missing_keys"]), ("has other shapes of", report["mismatched_keys"])):
        if names:
            first = min(map(str, names))
            raise UserError(
                f"model {model!r}: {len(names)} tensors are not as config.json has them: it {what} {first}; "
                "mend the folder, for they would be random"
            )
    if unused := sorted(map(str, report["unexpected_keys"])):
        _log.warning(
            "model %r: its files hold %d tensors that config.json has no place for: %s …", model, len(unused), unused[0]
        )
    files = {*tokenizer.vocab_files_names.values(), "tokenizer.json", "tokenizer_config.json"}
    if not where and not any((folder / name).is_file() for name in files):
        # Without this transformers makes up an empty tokenizer and says nothing.
        raise UserError(f"model {model!r}: the folder has no tokenizer; copy the model's tokenizer files into it")
    if where and hasattr(loaded.config, "quantization_config"):
        # The weights are dequantized on loading; with the mark left on, saving would refuse.
        del loaded.config.quantization_config
    return loaded.to(device).eval(), tokenizer
