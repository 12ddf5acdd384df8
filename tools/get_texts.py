"""Write long plain texts into a folder: the manuals in Debian's documentation packages.

    python tools/get_texts.py models/texts                       # PostgreSQL, Perl, the kernel
    python tools/get_texts.py models/texts --packages perl-doc   # any packages of the apt sources
    python tools/get_texts.py models/texts --deb perl-doc_*.deb  # packages that are here already

`apt-get download` fetches packages without root and installs nothing; `dpkg-deb` unpacks them. Every manual page
becomes one file: HTML without its tags, POD and reStructuredText as they are. OUT/sources.json names the packages,
their versions and their hashes. Published numbers used Debian 12's postgresql-doc-15 15.20-0+deb12u1, perl-doc
5.36.0-7+deb12u4 and linux-doc-6.1 6.1.192-1; those of the claim `recipe` 15.18-0+deb12u1, 5.36.0-7+deb12u3 and
6.1.176-1.
"""

import argparse
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = ("postgresql-doc-15", "perl-doc", "linux-doc-6.1")
PLAIN = (".txt", ".rst", ".pod")
# Shorter pages are mostly lists of links.
SHORTEST = 2000
HIDDEN = ("script", "style", "head")
BREAKS = ("p", "div", "h1", "h2", "h3", "h4", "h5", "li", "tr", "pre", "dt", "dd", "br", "table")


class GetError(Exception):
    """Why the texts cannot be written, in a sentence."""


class _Text(HTMLParser):
    """The text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in HIDDEN
        if tag in BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in HIDDEN
        if tag in BREAKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def plain_text(name: str, content: bytes) -> str | None:
    """The text of a file, or None for a file that is no text. name: decides how it is read."""
    if name.endswith(".gz"):
        name, content = name.removesuffix(".gz"), gzip.decompress(content)
    suffix = Path(name).suffix
    if suffix not in (*PLAIN, ".html"):
        return None
    text = content.decode("utf-8", "replace")
    if suffix == ".html":
        page = _Text()
        page.feed(text)
        text = re.sub(r"[ \t]+\n", "\n", "".join(page.parts))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def texts_in(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of every long page below a folder, each once. A folder with sources of pages gives no HTML."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    has_sources = sum(path.name.removesuffix(".gz").endswith(PLAIN) for path in files) > len(files) // 4
    seen: set[str] = set()
    for path in files:
        if has_sources and path.suffix == ".html":
            continue
        text = plain_text(path.name, path.read_bytes())
        if text is not None and len(text) >= SHORTEST and text not in seen:
            seen.add(text)
            yield re.sub(r"[^A-Za-z0-9]+", "-", str(path.relative_to(folder).with_suffix(""))).strip("-"), text


def download(packages: list[str], folder: Path) -> list[Path]:
    """The packages, from the apt sources of this machine."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise GetError("this needs apt-get and dpkg-deb, of Debian; elsewhere use any folder of .txt files as texts")
    done = subprocess.run(["apt-get", "download", *packages], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("E:")] or ["E: no reason given"]
        raise GetError(
            f"apt-get could not download {' '.join(packages)}: {reasons[0].removeprefix('E: ')}. `apt-get update` may "
            "be missing, another release has other versions in its names (--packages), and without a network packages "
            "can be given with --deb"
        )
    return sorted(folder.glob("*.deb"))


def unpack(package: Path, out: Path) -> dict[str, object]:
    """Write the texts of a package below OUT. Returns where they are from."""
    name, version, *_ = package.name.removesuffix(".deb").split("_")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["dpkg-deb", "-x", str(package), folder], capture_output=True, text=True, check=False)
        if done.returncode:
            raise GetError(f"{package.name} cannot be unpacked: {done.stderr.strip()}")
        (out / name).mkdir(parents=True, exist_ok=True)
        sizes = []
        for page, text in texts_in(Path(folder)):
            (out / name / f"{page[-150:]}.txt").write_text(text)
            sizes.append(len(text))
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    return {"package": name, "version": version, "sha256": digest, "texts": len(sizes), "characters": sum(sizes)}


def main() -> int:
    """Download, unpack, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to be written; must not exist or be empty")
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), metavar="NAME", help=" ".join(PACKAGES))
    parser.add_argument("--deb", nargs="+", type=Path, metavar="FILE", help="packages that are here already")
    args = parser.parse_args()
    try:
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise GetError(f"OUT must be new or an empty folder, got {str(args.out)!r}")
        with tempfile.TemporaryDirectory() as folder:
            packages = args.deb or download(args.packages, Path(folder))
            sources = [unpack(package, args.out) for package in packages]
    except GetError as error:
        print(f"get_texts: error: {error}", file=sys.stderr)
        return 1
    (args.out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")
    for source in sources:
        print(f"{source['package']} {source['version']}: {source['texts']} texts, {source['characters']} characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
