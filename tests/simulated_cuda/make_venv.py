"""Makes a virtual environment with the CUDA build of torch over simulated CUDA devices.

    python make_venv.py FOLDER

It has the version of torch that this Python has, with CUDA in place of the CPU, and all other packages from here. The
wheel of torch is about 500 MB, and takes 1.2 GB; NVIDIA's own libraries are not installed. Exit status 75 means that
the wheel cannot be had, 1 that something else failed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
CANNOT_BE_HAD = 75
# Their headers show whether abi.h is right. Where they cannot be had, that test is skipped.
HEADERS = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")


def make(folder: Path) -> int:
    """Make the environment; return an exit status."""
    version = importlib.metadata.version("torch").partition("+")[0]
    venv.create(folder, with_pip=False, clear=True)
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # With ===, 2.13.0+cpu of an index that has both is not taken for 2.13.0.
    failed = _install(packages, f"torch==={version}")
    if failed or not (packages / "torch" / "lib" / "libtorch_cuda.so").is_file():
        _say(f"the CUDA build of torch {version} cannot be had: {failed or 'this is a build for the CPU'}")
        return CANNOT_BE_HAD
    # Packages of this Python come after those of the new environment, so that it keeps its torch.
    (packages / "zz_packages_from.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    headers = folder / "headers"
    if failed := _install(headers, *HEADERS):
        _say(f"NVIDIA's headers cannot be had, so their comparison with abi.h is left out: {failed}")
    else:
        shutil.copytree(headers / "nvidia" / "cu13" / "include", packages / "nvidia" / "cu13" / "include")
    shutil.rmtree(headers, ignore_errors=True)
    for file in (HERE / "in_python").glob("*.py"):
        shutil.copy(file, packages)
    (packages / "simulated_cuda.pth").write_text("import simulated_cuda_start\n")
    command = [folder / "bin" / "python", HERE / "build.py", *_others_that_use_cuda()]
    return subprocess.run([str(each) for each in command]).returncode


def _install(target: Path, *packages: str) -> str:
    """Install without dependencies; return pip's last line when it fails."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(target)]
    done = subprocess.run([*command, *packages], capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def _others_that_use_cuda() -> list[Path]:
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is None or spec.origin is None:
        return []
    return sorted(Path(spec.origin).parent.glob("libbitsandbytes_cuda130.so"))


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - a command line prints


if __name__ == "__main__":
    sys.exit(make(Path(sys.argv[1]).absolute()))
