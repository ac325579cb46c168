"""The folder of a model, opened once for a call, so that the files checked are the files used. Imports no torch.

Its config.json, generation_config.json and index are read once, the headers of its weight files too, and each file is
stamped before. Whoever lets an engine read the folder again asks :meth:`ModelFolder.require_unchanged` afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, errors_of

from .files import pointed_bytes, size_of
from .index import Checkpoint, inspect_checkpoint, refuse_changed, require_whole
from .json_files import JsonFiles
from .weight_files import MODEL_PICKLES, MODEL_SINGLE, Kind

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


class ModelFolder:
    """The facts of a folder, each read from disk when it is first asked for, and kept."""

    def __init__(self, path: Path) -> None:
        """Open the folder; nothing is read yet."""
        self.path = path
        self.files = JsonFiles()
        self._inspected: dict[tuple[str | None, Kind | None], tuple[Checkpoint | None, list[Finding]]] = {}

    @property
    def config(self) -> JsonObject | None:
        """The content of config.json, its classes as a list; None if there is none. A damaged one is refused."""
        config = self.files.read(self.path / CONFIG)
        named = None if config is None else config.get("architectures")
        return {**config, "architectures": [named]} if config is not None and isinstance(named, str) else config

    @property
    def generation_config(self) -> JsonObject | None:
        """The content of generation_config.json; None if there is none. A damaged one is refused."""
        return self.files.read(self.path / GENERATION_CONFIG)

    def read_checkpoint(self, *, variant: str | None = None) -> Checkpoint:
        """Read the headers of the model's weight files, as :func:`index.read_checkpoint` does."""
        return require_whole(self.path, self.inspect_checkpoint(variant=variant, kind="model"))

    def inspect_checkpoint(
        self, *, variant: str | None = None, kind: Kind | None = None
    ) -> tuple[Checkpoint | None, list[Finding]]:
        """Read the headers of the weight files, as :func:`index.inspect_checkpoint` does."""
        if (variant, kind) not in self._inspected:
            found = inspect_checkpoint(self.path, variant=variant, kind=kind, files=self.files)
            self._inspected[variant, kind] = found
            if found[0] is not None:  # whoever asks for that kind gets what was read
                self._inspected.setdefault((variant, found[0].kind), found)
        checkpoint, findings = self._inspected[variant, kind]
        return checkpoint, [*findings]  # to which a caller may add its own

    @property
    def whole_checkpoint(self) -> Checkpoint | None:
        """The headers of the model's weight files; None where they are not there, or not whole."""
        checkpoint, findings = self.inspect_checkpoint(kind="model")
        return None if errors_of(findings) else checkpoint

    @property
    def bytes_elsewhere(self) -> int | None:
        """The bytes of weights that are not here or stay unread: by an index, pointers of Git LFS, or pickles.

        None where the headers are here, which say more, and where nothing says it.
        """
        checkpoint, _ = self.inspect_checkpoint(kind="model")
        index = None if checkpoint is None else checkpoint.index
        if checkpoint is not None and checkpoint.tensors:
            return None
        if index is not None and index.total_size:
            return index.total_size
        names = {MODEL_SINGLE} if index is None else set(index.weight_map.values())
        pointed = [pointed_bytes(self.path / name) for name in names]
        if None not in pointed:
            return sum(filter(None, pointed))
        single, of_several = (self.path / name for name in MODEL_PICKLES)
        listed = self.files.try_read(of_several) if of_several.is_file() else {}
        metadata = listed.get("metadata") if isinstance(listed, dict) else None
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        # older releases of transformers wrote it as a float
        return pointed_bytes(single) or size_of(single) or (int(total) if isinstance(total, (int, float)) else None)

    @property
    def stamps(self) -> Mapping[Path, tuple[int, ...]]:
        """``files.stamp`` of every file that was read, from before it was."""
        weights = [checkpoint.stamps for checkpoint, _ in self._inspected.values() if checkpoint is not None]
        return {path: before for stamps in (self.files.stamps, *weights) for path, before in stamps.items()}

    def require_unchanged(self) -> None:
        """Refuse a folder of which another process has written or replaced a file since it was read here."""
        refuse_changed(self.path, self.stamps)
