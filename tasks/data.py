"""Raw data -> prepared arrays -> splits. Each folder has a note of its origin, by which a run finds the right one.

DVC versions data/prepared, and below data/splits the splits of each seed. A run whose settings need other data than
these makes its own under .fcl/data, named by those settings. Before a run reads them, data that were changed or cut
short are refused in data/ and made anew in .fcl/data.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from fclmodels import plugins
from fclmodels.data import prepare as preparing
from fclmodels.data.prepare import Prepared
from fclmodels.data.splits import make_splits as splitting
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.settings.load import flatten_settings
from fclmodels.settings.schema import Params
from fclmodels.source_digest import digest_sources
from fclmodels.storage.digests import digest_json
from fclmodels.storage.files import lock_file
from fclmodels.storage.sealed_json import write_json
from fclmodels.storage.untrusted import read_json

PREPARED = Path("data/prepared")
SPLITS = Path("data/splits")
NOTE = "made-from.json"


@dataclass(frozen=True)
class Origin:
    """All that prepared data, or splits, depend on."""

    facts: dict[str, Any]  # settings by dotted name, raw files, code

    @property
    def name(self) -> str:
        return digest_json(self.facts)[:16]

    def matches(self, folder: Path) -> bool:
        return not self.list_differences(folder)

    def list_differences(self, folder: Path) -> list[str]:
        """Return the names of the facts in which the folder differs."""
        try:
            facts = dict(read_json(folder / NOTE))
        except (OSError, ValueError, TypeError):
            return [f"no {NOTE}"]
        return sorted(k for k in {**facts, **self.facts} if facts.get(k) != self.facts.get(k))

    def write_note(self, folder: Path) -> None:
        write_json(folder / NOTE, self.facts)


def get_prepared_origin(params: Params) -> Origin:
    source = plugins.find("source", params.data.source)(params.data)
    settings = flatten_settings({"data": params.data.model_dump(mode="json")})
    code = digest_sources(*source.modules, preparing.__name__)
    raw = [_digest_listing(folder) for folder in source.folders]
    return Origin({**settings, "code of data": code, "raw files": raw})


def get_splits_origin(params: Params) -> Origin:
    modules = [plugins.find(kind, getattr(params, kind).kind).__module__ for kind in ("stream", "partition")]
    blocks = {kind: getattr(params, kind).model_dump(mode="json") for kind in ("stream", "partition")}
    code = digest_sources(*modules, splitting.__name__)
    return Origin({**get_prepared_origin(params).facts, **flatten_settings(blocks), "code of splits": code})


@task(name="prepare", task_run_name="prepare {folder}", cache_policy=NO_CACHE)
def prepare(params: Params, folder: Path) -> dict[str, Any]:
    """Decode the source once; return the content of meta.json and the number of samples."""
    source = plugins.find("source", params.data.source)(params.data)
    prepared = preparing.prepare(source, folder)
    get_prepared_origin(params).write_note(folder)
    return prepared.meta.model_dump(mode="json") | {"samples": len(prepared.samples)}


@task(name="partition", task_run_name="partition {folder}", cache_policy=NO_CACHE)
def partition(params: Params, prepared: Path, folder: Path) -> dict[str, Any]:
    """Assign samples to tasks, clients and splits; return the content of statistics.json."""
    (folder / NOTE).unlink(missing_ok=True)
    Prepared.open(prepared).verify()
    stream = plugins.find("stream", params.stream.kind)(params.stream)
    splitting.write_splits(prepared, stream, plugins.find("partition", params.partition.kind)(params.partition), folder)
    get_splits_origin(params).write_note(folder)
    return json.loads((folder / "statistics.json").read_text())


def find_splits(params: Params, home: Path) -> Path | None:
    """Return the folder of the splits of these settings, None if there is none."""
    origin = get_splits_origin(params)
    folders = (*list_versioned_splits(), home / "data" / f"splits-{origin.name}")
    return next((folder for folder in folders if origin.matches(folder) and _has_prepared(folder)), None)


def list_versioned_splits() -> list[Path]:
    """Return the folders below data/splits that have a note of their origin, one for each seed."""
    return sorted(note.parent for note in SPLITS.glob(f"*/{NOTE}"))


def ensure_splits(params: Params, home: Path, tell: Callable[[str], None]) -> Path:
    """Return the folder of the splits of these settings: of data/splits, or a run's own, made if it is not there."""
    origin = get_splits_origin(params)
    own = home / "data" / f"splits-{origin.name}"
    versioned = find_splits(params, home)
    if versioned is not None and versioned != own:
        refuse_changed(versioned)
        return versioned
    differences = {folder: origin.list_differences(folder) for folder in list_versioned_splits()}
    if differences:
        nearest = min(differences, key=lambda folder: len(differences[folder]))
        tell(f"{nearest} has another origin ({', '.join(differences[nearest][:4])}): this run uses {own}")
    with lock_file(home / "data" / "lock"):
        if not (origin.matches(own) and _is_intact(refuse_changed, own)):
            partition(params, _ensure_prepared(params, home), own)
    return own


def refuse_changed(splits: Path) -> None:
    """Raise UserError where the splits, or their prepared samples, no longer match their digests."""
    prepared = Splits.open(splits).prepared.resolve()
    Prepared.open(Path(os.path.relpath(prepared))).verify()


def _ensure_prepared(params: Params, home: Path) -> Path:
    origin = get_prepared_origin(params)
    if origin.matches(PREPARED):
        return PREPARED
    own = home / "data" / f"prepared-{origin.name}"
    if not (origin.matches(own) and _is_intact(lambda folder: Prepared.open(folder).verify(), own)):
        prepare(params, own)
    return own


def _is_intact(refuse: Callable[[Path], None], folder: Path) -> bool:
    try:
        refuse(folder)
    except UserError:
        return False
    return True


def _has_prepared(splits: Path) -> bool:
    """Return whether the prepared samples are still those from which the splits were made."""
    try:
        facts = read_json(splits / "stream.json")
        return Prepared.open(splits / facts["prepared"]).meta.digest == facts["prepared_digest"]
    except (OSError, ValueError, LookupError, TypeError, UserError):
        return False


def _digest_listing(root: Path) -> str | None:
    """Return a digest of names and sizes of the raw files, None without a folder; not of times, new in every copy."""
    if not root.is_dir():
        return None
    return digest_json(
        sorted((str(path.relative_to(root)), path.stat().st_size) for path in root.rglob("*") if path.is_file())
    )
