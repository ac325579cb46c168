"""Builds the simulated CUDA libraries for one installed torch: its own binaries say which functions they have to hold.

    python build.py [--into FOLDER] [EXTRA.so ...]

FOLDER is by default site-packages/nvidia/cu13/lib, where torch's libraries look first (their RPATH). EXTRA are other
binaries that use CUDA, such as those of bitsandbytes. A program ``nvidia-smi`` goes beside this Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "libraries"
CORE = "libcudart.so.13"
DRIVER = (CORE, "libcuda.so.1", "libnvidia-ml.so.1")
ALWAYS = {*DRIVER, "libcurand.so.10"}
CORE_FILES = ["log", "machine", "memory", "order", "runtime_devices", "runtime_memory", "runtime_streams"]
FILES = {
    CORE: [*CORE_FILES, "runtime_kernels"],
    "libcuda.so.1": ["driver"],
    "libnvidia-ml.so.1": ["nvml"],
    "libnccl.so.2": ["nccl", "nccl_exchange", "nccl_numbers"],
}
# Functions without a version belong to a library by their name.
BY_NAME = {
    r"cuFile": "libcufile.so.0",
    r"cusparseLt": "libcusparseLt.so.0",
    r"nccl|pnccl": "libnccl.so.2",
    r"nvshmem": "libnvshmem_host.so.3",
    r"curand": "libcurand.so.10",
    r"nvJitLink|__nvJitLink": "libnvJitLink.so.13",
    r"cu[A-Z]": "libcuda.so.1",
}
VERSION_TO_FILE = {"NVSHMEM": "libnvshmem_host.so.3"}
# The first argument of these gets a new handle. Every other function without a source does nothing and returns zero.
MAKES_A_HANDLE = r"(Create|_createDescr|InfoCreate)"
FLAGS = ["-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", f"-I{SOURCES}"]


class CannotBuildError(RuntimeError):
    """The simulated libraries cannot be built here; the text says why."""


def wanted(binaries: list[Path]) -> dict[str, dict[str, str | None]]:
    """For each library, the functions that the binaries use of it, each with its version."""
    found: dict[str, dict[str, str | None]] = {name: {} for name in ALWAYS}
    for binary in binaries:
        for library in re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", _said_by("readelf", "-dW", binary)):
            found.setdefault(library, {})
        for line in _said_by("nm", "-D", "--undefined-only", binary).splitlines():
            name, _, version = line.split()[-1].partition("@")
            version = version.lstrip("@")
            if re.match(r"lib(cu|nv)", version) or version in VERSION_TO_FILE:
                found.setdefault(VERSION_TO_FILE.get(version, version), {})[name] = version
            elif not version:
                library = next((library for start, library in BY_NAME.items() if re.match(start, name)), None)
                if library is not None and not name.startswith("_Z"):
                    found.setdefault(library, {}).setdefault(name, None)
    return found


def compile_library(library: str, functions: dict[str, str | None], folder: Path, work: Path) -> str:
    """Compile one library into `folder`; return a line about it."""
    short = re.sub(r"\.so.*", "", library)
    files = FILES.get(library, [short] if (SOURCES / f"{short}.c").is_file() else [])
    objects = []
    for file in files:
        objects.append(work / f"{short}.{file}.o")
        _said_by("gcc", *FLAGS, "-c", SOURCES / f"{file}.c", "-o", objects[-1])
    missing = sorted(set(functions) - _defined(objects))
    generated = work / f"{short}.stubs.c"
    generated.write_text('#include "core.h"\n#include <stdlib.h>\n' + "".join(map(_stub, missing)))
    versions = sorted({version for version in functions.values() if version})
    script = work / f"{short}.map"
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions) or "{ global: *; };\n")
    # A program that asks for libcuda.so.1 or libnvidia-ml.so.1 by name finds the one that is loaded, and so they are.
    links = [] if library == CORE else [folder / CORE]
    links += [] if library in DRIVER else [folder / each for each in DRIVER[1:]]
    _said_by(
        "gcc", *FLAGS, "-Wno-builtin-declaration-mismatch", "-shared", *objects, generated, "-o", folder / library,
        f"-Wl,-soname,{library}", f"-Wl,--version-script={script}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", *links,
        "-lpthread", "-ldl", "-lrt",
    )  # fmt: skip
    return f"{library:24} {len(functions):4} functions, {len(missing):4} of them do nothing"


def build(torch: Path, folder: Path, programs: Path, extra: list[Path]) -> list[str]:
    """Build all libraries for the torch in a folder; return a line about each."""
    folder.mkdir(parents=True, exist_ok=True)
    found = wanted([*sorted((torch / "lib").glob("*.so*")), *extra])
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        work = Path(name)
        lines = [compile_library(CORE, found.pop(CORE), folder, work)]
        lines += [compile_library(each, found.pop(each), folder, work) for each in DRIVER[1:]]
        others = sorted(found)
        lines += pool.map(lambda each: compile_library(each, found[each], folder, work), others)
    smi = programs / "nvidia-smi"
    libraries = [folder / each for each in DRIVER]
    _said_by("gcc", *FLAGS, SOURCES / "nvidia_smi.c", "-o", smi, *libraries, f"-Wl,-rpath,{folder}")
    return lines


def _said_by(*command: str | Path) -> str:
    try:
        done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CannotBuildError(f"{command[0]} is not on the PATH (install gcc and binutils)") from error
    if done.returncode:
        raise CannotBuildError(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return done.stdout


def _defined(objects: list[Path]) -> set[str]:
    names = [_said_by("nm", "--defined-only", "-g", each) for each in objects]
    return {line.split()[-1] for text in names for line in text.splitlines()}


def _stub(name: str) -> str:
    body = f'sim_note("{name}"); return 0;'
    if re.search(MAKES_A_HANDLE, name):
        return f"API long {name}(void **made) {{ *made = calloc(1, 1024); {body} }}\n"
    return f"API long {name}(void) {{ {body} }}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path)
    parser.add_argument("extra", nargs="*", type=Path)
    given = parser.parse_args()
    spec = importlib.util.find_spec("torch")  # does not import it
    if spec is None or spec.origin is None:
        raise CannotBuildError("there is no torch in this Python")
    torch = Path(spec.origin).parent
    folder = given.into or torch.parent / "nvidia" / "cu13" / "lib"
    for line in build(torch, folder, Path(sys.executable).parent, given.extra):
        print(line)  # noqa: T201 - a command line prints


if __name__ == "__main__":
    main()
