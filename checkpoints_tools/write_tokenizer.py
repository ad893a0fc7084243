"""The target's tokenizer beside a draft model cut out of it."""

import shutil
from pathlib import Path
from typing import Any

from checkpoints_tools.published_layout import write_json
from checkpoints_tools.target_checkpoint import Target

_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "generation_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_ROLES = ("bos", "eos", "unk", "pad")


def write_tokenizer(target: Target, output: Path) -> None:
    """Copies the files of a folder; writes what a GGUF file's tokenizer is as such files."""
    if target.path.is_dir():
        for name in _FILES:
            if (target.path / name).is_file():
                shutil.copyfile(target.path / name, output / name)
        return
    model = target.model
    tokenizer = model.tokenizer
    (output / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    settings: dict[str, Any] = {
        f"{role}_token": getattr(tokenizer, f"{role}_token")
        for role in _ROLES
        if getattr(tokenizer, f"{role}_token") is not None
    }
    settings |= {"add_bos_token": tokenizer.adds_bos, "add_eos_token": tokenizer.adds_eos}
    if model.chat_template is not None:
        settings["chat_template"] = model.chat_template.source
    write_json(output / "tokenizer_config.json", settings)
    generation = {"eos_token_id": list(model.eos_token_ids), **model.sampling_defaults}
    write_json(output / "generation_config.json", generation)
