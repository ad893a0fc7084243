"""Makes OpenVINO folders of a GGUF's weights for scripts/bench_vs_peers; offline.

Usage: prepare_openvino.py GGUF FOLDER

transformers expands the GGUF to float32 and optimum-intel converts that: FOLDER/float32 holds the
very same weights, FOLDER/int4 the same compressed again by nncf (int4 with minimum, groups of 32,
embedding and output matrix int8), which is what a user of OpenVINO would serve. Done folders are
kept.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
FORMATS = {"float32": ["fp32"], "int4": ["int4", "--group-size", "32"]}


def expand(gguf: Path, folder: Path) -> None:
    """Write the Hugging Face folder with the GGUF's weights in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def export(expanded: Path, folder: Path, weights: list[str]) -> None:
    """Convert with optimum-intel's own command; the folder appears only when it is complete."""
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [
        str(Path(sys.executable).parent / "optimum-cli"),
        *("export", "openvino", "--model", str(expanded)),
        *("--task", "text-generation-with-past", "--weight-format", *weights),
        str(unfinished),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    unfinished.rename(folder)


def main() -> None:
    gguf, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    missing = [name for name in FORMATS if not (folder / name / "openvino_model.xml").exists()]
    if not missing:
        return
    expanded = folder / "expanded"
    print(f"[peer] converting {gguf.name} for OpenVINO (some minutes)", file=sys.stderr)
    expand(gguf, expanded)
    for name in missing:
        export(expanded, folder / name, FORMATS[name])
    shutil.rmtree(expanded)


if __name__ == "__main__":
    main()
