"""Raw data -> prepared arrays -> splits. Each folder notes what it was made from, so that a run knows its own.

DVC versions data/prepared and data/splits. A run whose settings ask for other data than these hold makes its own
under .fcl/data, named by those settings. What was changed or cut short since is refused in data/, and made anew in
.fcl/data, before a run reads it.
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
from fclmodels.data import split as splitting
from fclmodels.data.prepare import Prepared
from fclmodels.data.splits import Splits
from fclmodels.errors import UserError
from fclmodels.experiment import digest_of
from fclmodels.fingerprint import source_closure
from fclmodels.foreign import read_json
from fclmodels.params import flat
from fclmodels.settings import Params
from fclmodels.state import write_json
from tasks.locking import locked

PREPARED = Path("data/prepared")
SPLITS = Path("data/splits")
NOTE = "made-from.json"


@dataclass(frozen=True)
class Origin:
    """What prepared data, or splits, depend on: settings by dotted name, raw files, code."""

    facts: dict[str, Any]

    @property
    def name(self) -> str:
        return digest_of(self.facts)[:16]

    def is_of(self, folder: Path) -> bool:
        return not self.differs_from(folder)

    def differs_from(self, folder: Path) -> list[str]:
        """In what the folder differs from this."""
        try:
            noted = dict(read_json(folder / NOTE))
        except (OSError, ValueError, TypeError):
            return [f"no {NOTE}"]
        return sorted(k for k in {**noted, **self.facts} if noted.get(k) != self.facts.get(k))

    def note(self, folder: Path) -> None:
        write_json(folder / NOTE, self.facts)


def origin_of_prepared(params: Params) -> Origin:
    source = plugins.find("source", params.data.source)(params.data)
    settings = flat({"data": params.data.model_dump(mode="json")})
    code = source_closure(type(source).__module__, preparing.__name__)
    raw = [_stamp(folder) for folder in source.folders]
    return Origin({**settings, "code of data": code, "raw files": raw})


def origin_of_splits(params: Params) -> Origin:
    modules = [plugins.find(kind, getattr(params, kind).kind).__module__ for kind in ("stream", "partition")]
    blocks = {kind: getattr(params, kind).model_dump(mode="json") for kind in ("stream", "partition")}
    code = source_closure(*modules, splitting.__name__)
    return Origin({**origin_of_prepared(params).facts, **flat(blocks), "code of splits": code})


@task(name="prepare", task_run_name="prepare {folder}", cache_policy=NO_CACHE)
def prepare(params: Params, folder: Path) -> dict[str, Any]:
    """Decode the source once; what meta.json says of it."""
    source = plugins.find("source", params.data.source)(params.data)
    prepared = preparing.prepare(source, folder)
    origin_of_prepared(params).note(folder)
    return prepared.meta.model_dump(mode="json") | {"samples": len(prepared.samples)}


@task(name="partition", task_run_name="partition {folder}", cache_policy=NO_CACHE)
def partition(params: Params, prepared: Path, folder: Path) -> dict[str, Any]:
    """Samples to tasks, clients and splits; what statistics.json says of them."""
    (folder / NOTE).unlink(missing_ok=True)
    Prepared.open(prepared).verify()
    stream = plugins.find("stream", params.stream.kind)(params.stream)
    splitting.split(prepared, stream, plugins.find("partition", params.partition.kind)(params.partition), folder)
    origin_of_splits(params).note(folder)
    return json.loads((folder / "statistics.json").read_text())


def existing_splits(params: Params, home: Path) -> Path | None:
    """The splits that these settings ask for, where they are there."""
    wanted = origin_of_splits(params)
    folders = (SPLITS, home / "data" / f"splits-{wanted.name}")
    return next((folder for folder in folders if wanted.is_of(folder) and _prepared_is_there(folder)), None)


def splits_for(params: Params, home: Path, tell: Callable[[str], None]) -> Path:
    """The splits that these settings ask for: data/splits, or a run's own, made where they are not there yet."""
    wanted = origin_of_splits(params)
    own = home / "data" / f"splits-{wanted.name}"
    if wanted.is_of(SPLITS) and _prepared_is_there(SPLITS):
        refuse_changed(SPLITS)
        return SPLITS
    if SPLITS.exists():
        tell(f"{SPLITS} was made otherwise ({', '.join(wanted.differs_from(SPLITS)[:4])}): this run uses {own}")
    with locked(home / "data" / "lock"):
        if not (wanted.is_of(own) and _is_whole(refuse_changed, own)):
            partition(params, _prepared_for(params, home), own)
    return own


def refuse_changed(splits: Path) -> None:
    """UserError where the splits, or the samples that they number, are not what their digests name any more."""
    prepared = Splits.open(splits).prepared.resolve()
    Prepared.open(Path(os.path.relpath(prepared))).verify()


def _prepared_for(params: Params, home: Path) -> Path:
    wanted = origin_of_prepared(params)
    if wanted.is_of(PREPARED):
        return PREPARED
    own = home / "data" / f"prepared-{wanted.name}"
    if not (wanted.is_of(own) and _is_whole(lambda folder: Prepared.open(folder).verify(), own)):
        prepare(params, own)
    return own


def _is_whole(refuse: Callable[[Path], None], folder: Path) -> bool:
    try:
        refuse(folder)
    except UserError:
        return False
    return True


def _prepared_is_there(splits: Path) -> bool:
    """Whether the samples that the splits number are still the ones that they were made from."""
    try:
        facts = read_json(splits / "stream.json")
        return Prepared.open(splits / facts["prepared"]).meta.digest == facts["prepared_digest"]
    except (OSError, ValueError, LookupError, TypeError, UserError):
        return False


def _stamp(root: Path) -> str | None:
    """Names and sizes of the raw files. Not their times: DVC and Git give every copy new ones."""
    if not root.is_dir():
        return None
    return digest_of(
        sorted((str(path.relative_to(root)), path.stat().st_size) for path in root.rglob("*") if path.is_file())
    )
