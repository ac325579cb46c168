"""Configs that hypothesis writes, over every field that the installed peft and transformers declare, do no harm.

A child loads them under limits of time and memory. An audit hook hears what the interpreter opens, imports and
connects to, and strace sees what the whole process asks of the kernel, its native code included.
``python tests/faults/config_fuzz.py FOLDER SEED EXAMPLES`` repeats a seed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import config_fuzz

CHILD = Path(config_fuzz.__file__)
ROOT = Path(__file__).parents[1]
TRACED = (
    "open,openat,openat2,creat,connect,sendto,execve,execveat,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,"
    "rmdir,link,linkat,symlink,symlinkat,truncate"
)
SAMPLE, EACH, SLOW = 50, 500, 20  # configs in CI; configs of a seed in the slow set, and how many seeds
CALL = re.compile(r"^\d+\s+(\w+)\((.*)")
FOLDER_OF_CALL = re.compile(r"^\w*(?:AT_FDCWD|\d+)<([^>]*)>, ")
# What Python, torch and the C library read by themselves.
READ_BY_ITSELF = ("/proc", "/sys", "/dev/null", "/dev/urandom", "/usr", "/lib", "/etc/ld.so", "/etc/localtime")


def run(folder: Path, seed: int, examples: int, *tracer: str) -> list[str]:
    """Run the child; return the lines about what it must not have done."""
    folders = {"HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"), "HF_HOME": str(folder / "cache")}
    online = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    environment = {**os.environ, **folders, **online, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*tracer, sys.executable, str(CHILD), str(folder), str(seed), str(examples)]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3000, check=False)
    lines = child.stdout.splitlines()
    assert lines[-1:] == [f"tried {examples}"], child.stderr[-3000:]
    return [line for line in lines if line.startswith("{")]


def can_trace() -> bool:
    command = ["strace", "-f", "-e", "trace=none", "true"]
    return (
        shutil.which("strace") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path | None, Path]:
    """What a sample did, what strace wrote about it, and its folder."""
    folder = tmp_path_factory.mktemp("sample")
    trace = tmp_path_factory.mktemp("trace") / "calls" if can_trace() else None
    tracer = () if trace is None else ("strace", "-f", "-y", "-s", "4096", "-e", f"trace={TRACED}", "-o", str(trace))
    return run(folder, 0, SAMPLE, *tracer), trace, folder


def forbidden(calls: Iterator[str], folder: Path) -> list[str]:
    """Return the calls of the kernel that no load may make, out of those between the two marks."""
    here = {str(folder), str(ROOT), sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    mine = tuple(os.path.realpath(path) for path in here)
    found, counting = [], False
    for line in calls:
        call = CALL.match(line)
        if config_fuzz.STARTED in line or config_fuzz.ENDED in line:
            counting = config_fuzz.STARTED in line
        elif counting and call:
            found += [line.rstrip()] if _is_forbidden(call[1], call[2], mine, folder) else []
    return found


def _is_forbidden(name: str, arguments: str, mine: tuple[str, ...], folder: Path) -> bool:
    if name.startswith("execve") and '["ninja", "--version"]' in arguments:
        return False  # RWKV asks whether its kernel could be built, whatever its config says
    if name in ("connect", "sendto", "execve", "execveat"):
        return True
    within = FOLDER_OF_CALL.match(arguments)
    text = re.search(r'"([^"]*)"', arguments)
    path = os.path.realpath(os.path.join(within[1] if within else "/", text[1] if text else ""))  # noqa: PTH118
    if path.startswith(str(folder / "outside")):
        return True
    if name.startswith("open") and not re.search(r"O_(WRONLY|RDWR|CREAT)", arguments):
        return not path.startswith((*mine, *READ_BY_ITSELF))
    return not path.startswith((os.path.realpath(folder), "/dev/null"))


def test_a_sample_of_configs_does_no_harm(sample: tuple[list[str], Path | None, Path]) -> None:
    assert sample[0] == []


def test_strace_sees_no_file_outside_no_connection_and_no_program(sample: tuple[list[str], Path | None, Path]) -> None:
    _, trace, folder = sample
    if trace is None:
        pytest.skip("there is no strace, or it may not trace here")
    with trace.open(errors="replace") as calls:
        assert forbidden(calls, folder)[:20] == []
    with trace.open(errors="replace") as calls:
        assert sum(str(folder / "case") in line for line in calls) > SAMPLE  # it has seen the loads


@pytest.mark.parametrize("call", ["open outside", "connect", "program", "write elsewhere", "unlink elsewhere"])
def test_what_strace_must_not_see_is_found(tmp_path: Path, call: str) -> None:
    lines = {
        "open outside": f'7 openat(AT_FDCWD</x>, "{tmp_path}/outside/fifo", O_RDONLY|O_CLOEXEC <unfinished ...>',
        "connect": "7 connect(3<socket:[1]>, {sa_family=AF_INET, sin_port=htons(443)}, 16) = 0",
        "program": '7 execve("/bin/sh", ["sh"], 0x1 /* 2 vars */) = 0',
        "write elsewhere": '7 openat(5</root>, "x", O_WRONLY|O_CREAT, 0666) = 3',
        "unlink elsewhere": f'7 unlink("{ROOT}/x") = 0',
    }
    harmless = [f'7 openat(AT_FDCWD</x>, "{tmp_path}/case/config.json", O_RDONLY) = 3', f'7 unlink("{tmp_path}/x") = 0']
    marks = [f'7 openat(AT_FDCWD</x>, "/{name}", O_RDONLY) = -1' for name in (config_fuzz.STARTED, config_fuzz.ENDED)]
    before, after = lines[call], lines[call]
    assert forbidden(iter([before, marks[0], *harmless, marks[1], after]), tmp_path) == []
    assert forbidden(iter([marks[0], *harmless, lines[call], marks[1]]), tmp_path) == [lines[call]]


def test_the_audit_hook_hears_what_no_load_may_do(tmp_path: Path) -> None:
    script = """
import socket, subprocess, sys
from pathlib import Path
from faults.config_fuzz import Watch
watch = Watch(Path(sys.argv[1]))
for act in (
    lambda: open(sys.argv[1] + "/file"),
    lambda: __import__("antigravity"),
    lambda: socket.create_connection(("localhost", 9)),
    lambda: subprocess.run(["true"]),
):
    try:
        act()
    except OSError:
        pass
print([event.split()[0] for event in watch.seen])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "BROWSER": "true"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    for event in ("open", "import", "socket.getaddrinfo", "subprocess.Popen"):
        assert f"'{event}'" in child.stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, SLOW + 1))
def test_ten_thousand_configs_do_no_harm(tmp_path: Path, seed: int) -> None:
    assert run(tmp_path, seed, EACH) == []
