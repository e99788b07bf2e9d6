"""What arrives: a folder a task below `arrivals.incoming`, complete once its marker file is there.

It is a tree of images by class, or one Parquet table of paths and labels. What cannot be taken in gets a file that
says why, and is left alone until somebody deletes that file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fclmodels.data.sources.base import Source
from fclmodels.data.sources.image_folder import ImageFolder
from fclmodels.data.sources.image_table import ImageTable
from fclmodels.errors import UserError
from fclmodels.foreign import inside
from fclmodels.settings import ImageSettings
from fclmodels.state import replacing

MARKER, REASON = "COMPLETE", "SET-ASIDE.txt"


@dataclass(frozen=True, order=True)
class Arrived:
    """A complete folder; the first to come is the least."""

    at: int  # when its marker was written, in ns
    name: str
    folder: Path

    def source(self, images: ImageSettings) -> Source:
        """Its samples, to be decoded as these settings say; no link may lead to other people's files."""
        for path in self.folder.rglob("*"):
            if path.is_symlink():
                inside(self.folder, str(path.relative_to(self.folder)))
        tables = sorted(self.folder.glob("*.parquet"))
        if len(tables) > 1:
            raise UserError(f"{self.folder} holds {len(tables)} Parquet tables. Make one of them.")
        said = {name: getattr(images, name) for name in ("size", "channels", "mean", "std", "skip_bad")}
        if tables:
            return ImageTable(
                ImageTable.Settings(source=ImageTable.name, root=self.folder, table=Path(tables[0].name), **said)
            )
        return ImageFolder(ImageFolder.Settings(source=ImageFolder.name, root=self.folder, **said))

    def set_aside(self, reason: str) -> None:
        with replacing(self.folder / REASON) as temporary:
            temporary.write_text(f"{reason}\n\nMend it and delete this file: then it is looked at again.\n")


def arrived(incoming: Path) -> list[Arrived]:
    """The folders that are complete and not set aside, in order of arrival."""
    complete = [path for path in _folders(incoming) if (path / MARKER).is_file() and not (path / REASON).exists()]
    return sorted(Arrived((path / MARKER).stat().st_mtime_ns, path.name, path) for path in complete)


def not_taken(incoming: Path) -> Iterator[tuple[Path, str | None]]:
    """The other folders, by name: those that are set aside with the reason, and those that are not complete."""
    for path in _folders(incoming):
        if (path / REASON).exists():
            yield path, (path / REASON).read_text().partition("\n")[0]
        elif not (path / MARKER).is_file():
            yield path, None


def _folders(incoming: Path) -> list[Path]:
    found = incoming.iterdir() if incoming.is_dir() else ()
    return sorted(p for p in found if p.is_dir() and not p.is_symlink() and not p.name.startswith("."))
