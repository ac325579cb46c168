"""A stage that somebody else made: an archive, a clone, another user of a shared folder. Nothing outside is touched."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from folder_contents import fill, held, same

from safe_loading import OutputError
from safe_loading._output import stage_folders
from safe_loading._output.stage import Records, Stage

FILES = {"one.bin": b"1" * 500, "two.bin": b"2" * 300}
VICTIM = {"files/theirs.bin": b"theirs", "journal": b"their notes", "lock": b"their lock", "before/old.bin": b"old"}
JOB = {"base": "a"}
RECORDS = Records(
    lambda facts: isinstance(facts.get("sha256"), str), lambda folder, recorded: set(FILES) <= set(recorded)
)


@pytest.fixture(autouse=True)
def ends_in_time() -> Iterator[None]:
    """Nothing may hang: a FIFO, a device without end."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def save(target: Path, **options: Any) -> Stage:
    with Stage(target, JOB, **options) as stage:
        if stage.finished is None:
            for name, data in FILES.items():
                if stage.recorded(name, same) is None:
                    stage.write(name, data, {"sha256": hashlib.sha256(data).hexdigest()})
            stage.commit()
    return stage


def interrupted(target: Path) -> Path:
    """The stage of a call that Ctrl-C ended when both files were finished."""

    def run() -> None:
        with Stage(target, JOB) as stage:
            for name, data in FILES.items():
                stage.write(name, data, {"sha256": hashlib.sha256(data).hexdigest()})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    return target.parent / f".{target.name}.staged"


def test_a_stage_that_is_a_link_is_refused_by_name_and_nothing_behind_it_is_touched(tmp_path: Path) -> None:
    victim = fill(tmp_path / "victim", VICTIM)
    (tmp_path / ".out.staged").symlink_to(victim)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"out\.staged' is a symbolic link, not a folder\..*delete it, or name"):
            save(tmp_path / "out", overwrite=overwrite)
    assert held(victim) == VICTIM
    assert not (tmp_path / "out").exists()
    (tmp_path / ".out.staged").unlink()  # as the message says
    save(tmp_path / "out")
    assert held(tmp_path / "out") == FILES


def test_a_stage_that_is_a_file_or_holds_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".out.staged").write_text("mine")
    with pytest.raises(OutputError, match=r"out\.staged' is a file, not a folder"):
        save(tmp_path / "out")
    assert (tmp_path / ".out.staged").read_text() == "mine"
    project = fill(tmp_path / ".other.staged", {**VICTIM, "README.md": b"a project"})
    with pytest.raises(OutputError, match=r"holds 'README.md', which no unfinished output does"):
        save(tmp_path / "other")
    assert held(project) == {**VICTIM, "README.md": b"a project"}


def test_a_stage_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = interrupted(tmp_path / "out")
    before = held(root)
    monkeypatch.setattr(stage_folders, "os", SimpleNamespace(**{**vars(os), "getuid": lambda: os.getuid() + 1}))
    save(tmp_path / "mapped")  # a share that names one user for all: what this process makes there is named alike
    owner = os.getuid()
    monkeypatch.setattr(stage_folders, "_is_own", lambda facts, folder: facts.st_uid == owner + 1)
    with pytest.raises(OutputError, match=rf"belongs to another user \({owner}\)"):
        save(tmp_path / "out")
    assert held(root) == before


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "symbolic": lambda place, target: place.symlink_to(target),
    "second name": lambda place, target: os.link(target, place),
    "fifo": lambda place, target: os.mkfifo(place),
    "endless": lambda place, target: place.symlink_to("/dev/zero"),
    "folder": lambda place, target: place.mkdir(),
}


@pytest.mark.parametrize("kind", LINKS)
def test_a_lock_that_is_no_file_of_its_own_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    victim = fill(tmp_path / "victim", VICTIM)
    (tmp_path / ".out.staged").mkdir()
    LINKS[kind](tmp_path / ".out.staged" / "lock", victim / "lock")
    with pytest.raises(OutputError, match=r"staged/lock' is a .*not a file of an unfinished output. Delete it"):
        save(tmp_path / "out")
    assert held(victim) == VICTIM
    stage_folders.delete(tmp_path / ".out.staged" / "lock")
    save(tmp_path / "out")
    assert held(victim) == VICTIM


@pytest.mark.parametrize("kind", LINKS)
def test_a_journal_that_is_no_file_of_its_own_is_not_read_and_the_call_begins_anew(tmp_path: Path, kind: str) -> None:
    victim = fill(tmp_path / "victim", VICTIM)
    root = interrupted(tmp_path / "out")
    (root / "journal").rename(victim / "journal")  # even one that says what it should
    before = held(victim)
    LINKS[kind](root / "journal", victim / "journal")
    assert [finding.code for finding in save(tmp_path / "out").findings] == ["begun-anew"]
    assert held(tmp_path / "out") == FILES
    assert held(victim) == before


@pytest.mark.parametrize("name", ["files", "before"])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_folder_of_the_stage_that_is_a_link_is_dropped(tmp_path: Path, name: str, resumes: bool) -> None:
    victim = fill(tmp_path / "victim", VICTIM)
    root = interrupted(tmp_path / "out")
    if not resumes:
        (root / "journal").unlink()
    if name == "files":
        (root / "files").rename(tmp_path / "moved")
    (root / name).symlink_to(victim)
    save(tmp_path / "out")
    assert not (tmp_path / "out").is_symlink()
    assert held(tmp_path / "out") == FILES
    assert held(victim) == VICTIM


def edits(events: list[Any]) -> dict[str, bytes]:
    """A journal of three events, edited: each is JSON, and none is what this package writes."""

    def lines(*changed: Any) -> bytes:
        return b"".join(json.dumps(event).encode() + b"\n" for event in changed)

    job, one, two = events
    inode: list[Any] = [0, 0]
    return {
        "a list": lines([1], job, one, two),
        "no event": lines({}, one, two),
        "no job": lines({"event": "job"}, one, two),
        "the job is a text": lines({"event": "job", "job": "a"}, one, two),
        "two jobs": lines(job, job, one),
        "files without a job": lines(one, two),
        "an event of another kind": lines(job, {"event": "delete", "name": "/"}, one),
        "an event that is a list": lines(job, {"event": ["file"]}, one),
        "a file without a name": lines(job, {"event": "file", "facts": one["facts"]}),
        "a name that is a number": lines(job, {**one, "name": 7}),
        "a name that is a list": lines(job, {**one, "name": ["one.bin"]}),
        "no facts": lines(job, {"event": "file", "name": "one.bin"}),
        "facts that are null": lines(job, {**one, "facts": None}),
        "facts that are a list": lines(job, {**one, "facts": [1]}),
        "facts of another kind": lines(job, {**one, "facts": {"sha256": 7}}),
        "facts without a hash": lines(job, {**one, "facts": {"md5": ""}}),
        "no inode": lines(job, one, two, {"event": "commit"}),
        "an inode that is a text": lines(job, one, {"event": "commit", "inode": "00"}),
        "an inode of three": lines(job, one, {"event": "commit", "inode": [*inode, 0]}),
        "an inode of texts": lines(job, one, {"event": "commit", "inode": ["0", "0"]}),
        "brackets": b"[" * 100_000 + b"\n" + lines(job, one),
        "brackets in a job": b'{"event":"job","job":' + b"[" * 100_000 + b"\n" + lines(one),
        "no text": b"\xff\xfe\x00" * 9 + b"\n" + lines(job),
        "half a surrogate as the kind": b'{"event":"\\ud800"}\n' + lines(job),
    }


EVENTS = [
    {"event": "job", "job": JOB},
    *(
        {"event": "file", "name": name, "facts": {"sha256": hashlib.sha256(data).hexdigest()}}
        for name, data in FILES.items()
    ),
]


@pytest.mark.parametrize("case", edits(EVENTS))
def test_an_edited_journal_means_to_begin_anew_with_a_finding(tmp_path: Path, case: str) -> None:
    root = interrupted(tmp_path / "out")
    assert [json.loads(line) for line in (root / "journal").read_bytes().splitlines()] == EVENTS
    (root / "journal").write_bytes(edits(EVENTS)[case])
    (root / "files" / "one.bin").write_bytes(b"evil")
    stage = save(tmp_path / "out", records=RECORDS)
    assert [finding.code for finding in stage.findings] == ["begun-anew"]
    assert held(tmp_path / "out") == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_commit_that_misses_a_file_is_not_believed(tmp_path: Path) -> None:
    root = interrupted(tmp_path / "out")
    fill(tmp_path / "out", {"one.bin": b"evil"})
    facts = (tmp_path / "out").stat()
    commit = {"event": "commit", "inode": [facts.st_dev, facts.st_ino]}
    (root / "journal").write_bytes(b"".join(json.dumps(event).encode() + b"\n" for event in (*EVENTS[:2], commit)))
    with pytest.raises(OutputError, match="is not empty"):
        save(tmp_path / "out", records=RECORDS)
    assert held(tmp_path / "out") == {"one.bin": b"evil"}
    save(tmp_path / "out", records=RECORDS, overwrite=True)
    assert held(tmp_path / "out") == FILES


@pytest.mark.parametrize("kind", ["symbolic", "second name", "fifo"])
@pytest.mark.parametrize("in_folder", [True, False])
def test_a_finished_file_that_became_a_link_is_never_committed(tmp_path: Path, kind: str, in_folder: bool) -> None:
    fill(tmp_path / "elsewhere", FILES)

    def run() -> None:
        with Stage(tmp_path / "out", JOB) as stage:
            name = "deep/one.bin" if in_folder else "one.bin"
            stage.write(name, FILES["one.bin"], {"sha256": ""})
            (stage.files / name).unlink()
            LINKS[kind](stage.files / name, tmp_path / "elsewhere" / "one.bin")
            stage.commit()

    with pytest.raises(OutputError, match=r"one\.bin' was put into the unfinished output by somebody else .* was not"):
        run()
    assert not (tmp_path / "out").exists()
    assert held(tmp_path / "elsewhere") == FILES
    save(tmp_path / "out")
    assert held(tmp_path / "out") == FILES


def age(root: Path) -> None:
    for path in (*root.rglob("*"), root):
        if not path.is_symlink():
            os.utime(path, (path.stat().st_mtime - 8 * 86400,) * 2)


@pytest.mark.parametrize("name", ["root", "files", "journal", "lock", "brackets"])
@pytest.mark.parametrize("kind", ["symbolic", "second name", "fifo", "endless"])
def test_a_sibling_that_somebody_made_is_neither_followed_nor_waited_for(tmp_path: Path, kind: str, name: str) -> None:
    victim = fill(tmp_path / "victim", VICTIM)
    before = held(victim)
    sibling = interrupted(tmp_path / "sibling")
    age(sibling)
    place = sibling if name == "root" else sibling / name
    if name == "brackets":
        (sibling / "journal").write_bytes(b"[" * 100_000 + b"\n")
    elif kind == "second name" and name in ("root", "files"):
        pytest.skip("a folder has one name")
    else:
        place.rename(tmp_path / "moved")
        LINKS[kind](place, victim if name == "root" else victim / name)
    os.utime(sibling, (0, 0), follow_symlinks=False)
    save(tmp_path / "out")
    assert held(tmp_path / "out") == FILES
    assert held(victim) == before


def test_the_owner_that_a_foreign_lock_names_is_shown_printable_and_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_folders, "is_network", lambda kind: True)
    monkeypatch.setattr(stage_folders, "_machine", lambda: "mine")
    other = fill(tmp_path / ".out.staged-a", {"lock": b"\x1b[2Jpid\n::error::" + b"x" * 10**6})
    os.utime(other / "lock", (1, 1))
    with pytest.raises(OutputError, match="Another machine") as caught:
        save(tmp_path / "out")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1200
    (other / "lock").unlink()
    os.mkfifo(other / "lock")
    os.utime(other / "lock", (1, 1))
    with pytest.raises(OutputError, match=r"Another machine \(unknown\)"):
        save(tmp_path / "out")
