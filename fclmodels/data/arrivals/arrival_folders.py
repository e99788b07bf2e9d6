"""Folders that arrive below `arrivals.incoming`: one task each, complete once its marker file is there.

A folder holds a tree of images by class, or one Parquet table of paths and labels. One that cannot be taken in gets a
file with the reason, and is ignored until somebody deletes that file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fclmodels.data.sources.base import Source
from fclmodels.data.sources.image_folder import ImageFolder
from fclmodels.data.sources.image_table import ImageTable
from fclmodels.errors import UserError
from fclmodels.settings.schema import ImageSettings
from fclmodels.storage.files import replace_file
from fclmodels.storage.untrusted import resolve_inside

MARKER, REASON = "COMPLETE", "SET-ASIDE.txt"


@dataclass(frozen=True, order=True)
class ArrivedFolder:
    """A complete folder; they sort by arrival."""

    at: int  # when its marker was written, in ns
    name: str
    folder: Path

    def make_source(self, images: ImageSettings) -> Source:
        """Return a source of its samples, decoded by these settings; UserError where a link leads out of the folder."""
        for path in self.folder.rglob("*"):
            if path.is_symlink():
                resolve_inside(self.folder, str(path.relative_to(self.folder)))
        tables = sorted(self.folder.glob("*.parquet"))
        if len(tables) > 1:
            raise UserError(f"{self.folder} holds {len(tables)} Parquet tables. Make one of them.")
        options = {name: getattr(images, name) for name in ("size", "smaller", "channels", "mean", "std", "skip_bad")}
        if tables:
            return ImageTable(
                ImageTable.Settings(source=ImageTable.name, root=self.folder, table=Path(tables[0].name), **options)
            )
        return ImageFolder(ImageFolder.Settings(source=ImageFolder.name, root=self.folder, **options))

    def set_aside(self, reason: str) -> None:
        """Write the reason into the folder, which is ignored from then on."""
        with replace_file(self.folder / REASON) as temporary:
            temporary.write_text(f"{reason}\n\nRepair it and delete this file; the folder is then read again.\n")


def list_arrived(incoming: Path) -> list[ArrivedFolder]:
    """Return the folders that are complete and not set aside, in order of arrival."""
    complete = [path for path in _list_folders(incoming) if (path / MARKER).is_file() and not (path / REASON).exists()]
    return sorted(ArrivedFolder((path / MARKER).stat().st_mtime_ns, path.name, path) for path in complete)


def list_others(incoming: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the other folders by name: those set aside with the reason, incomplete ones with None."""
    for path in _list_folders(incoming):
        if (path / REASON).exists():
            yield path, (path / REASON).read_text().partition("\n")[0]
        elif not (path / MARKER).is_file():
            yield path, None


def _list_folders(incoming: Path) -> list[Path]:
    paths = incoming.iterdir() if incoming.is_dir() else ()
    return sorted(p for p in paths if p.is_dir() and not p.is_symlink() and not p.name.startswith("."))
