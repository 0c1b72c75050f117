"""Resumable runs: the store of finished units, and the loop that runs units and stores each outcome.

The store is one SQLite file that survives being killed at any moment. One row per finished unit, one transaction per
row, keyed by the hash of the unit's full configuration and guarded by a checksum (SQLite's own check does not see a
flipped byte inside a value). It knows nothing of what the units compute; arrays too large for a row are files beside
it, written whole or not at all. ``scan``, ``compare``, ``study`` and ``track`` share where the work runs
(:class:`Run`), the loop (:func:`drive`), and the folder with its store.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from strati.core.errors import BadInputError, StoppedError, StratiError
from strati.core.files import lock
from strati.core.results import Tick, jsonable, silent
from strati.jobs.engine import Body, Engine, Outcome, Unit, cores, run_here
from strati.jobs.progress import as_ticker

APPLICATION = 0x73747261  # "stra"
SCHEMA = 1
_BUSY_SECONDS = 60.0
_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL, checksum TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE units (key TEXT PRIMARY KEY, name TEXT NOT NULL, status TEXT NOT NULL, reason TEXT,
                    value TEXT NOT NULL, checksum TEXT NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Finished:
    """A finished unit as the store holds it: its value, or the reason why it failed."""

    key: str
    name: str
    value: Any
    reason: str | None = None


def unit_key(config: Mapping[str, Any]) -> str:
    """The key of a unit: a hash of everything its result depends on.

    Examples:
        >>> unit_key({"layer": "fc1", "draws": 2}) == unit_key({"draws": 2, "layer": "fc1"})
        True
    """
    return hashlib.sha256(_text(config).encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Store:
    """An open store. Any number of processes may have the same one open.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = Store(Path(folder) / "units.sqlite", about={"study": "an example"})
        ...     store.put(Finished("k1", "first", {"rows": [1.5]}))
        ...     (store.keys(), [unit.value for unit in store.units()])
        ({'k1'}, [{'rows': [1.5]}])
    """

    def __init__(self, path: str | Path, *, about: Mapping[str, Any] | None = None) -> None:
        """Open a store, or create one.

        Args:
            path: The SQLite file.
            about: What the store is about, written when it is created; without it the store must exist.

        Raises:
            BadInputError: The file is empty, damaged, not a store or of a newer strati, or cannot be written.
        """
        self.path = Path(path)
        if not os.path.lexists(self.path):
            if about is None:
                raise BadInputError(self.path, "there is no store here; give the folder of a study")
            _create(self.path, about)
        _check_file(self.path)
        with _explained(self.path):
            self._db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
            self._check_kind()
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")

    def about(self) -> dict[str, Any]:
        """What was written when the store was created."""
        with _explained(self.path):
            rows = self._db.execute("SELECT name, value, checksum FROM about ORDER BY name").fetchall()
        for name, text, checksum in rows:
            if checksum != _checksum(name, text):
                raise _damaged(self.path, f"the entry {name!r} has a wrong checksum")
        return {name: json.loads(text) for name, text, _ in rows}

    def put(self, unit: Finished) -> None:
        """Keep a finished unit, in one transaction; what is there as done already stays as it is.

        Raises:
            BadInputError: The disk is full or the store cannot be written.
        """
        text = _text(unit.value)
        status = "done" if unit.reason is None else "failed"
        row = (unit.key, unit.name, status, unit.reason, text)
        with _explained(self.path):
            # IMMEDIATE: with a plain BEGIN two writers meet at the upgrade of their lock and both give up.
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute(
                    "INSERT INTO units VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                    "status=excluded.status, reason=excluded.reason, value=excluded.value, "
                    "checksum=excluded.checksum WHERE units.status = 'failed'",
                    (*row, _checksum(*row)),
                )
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def keys(self, *, failed: bool = True) -> set[str]:
        """The keys of the finished units, with or without the failed ones."""
        with _explained(self.path):
            rows = self._db.execute("SELECT key FROM units WHERE ? OR status = 'done'", (failed,)).fetchall()
        return {key for (key,) in rows}

    def __contains__(self, key: object) -> bool:
        with _explained(self.path):
            return self._db.execute("SELECT 1 FROM units WHERE key = ?", (key,)).fetchone() is not None

    def get(self, key: str) -> Finished | None:
        """One finished unit, checked against its checksum; ``None`` if it is not there.

        Raises:
            BadInputError: Its row was damaged.
        """
        with _explained(self.path):
            row = self._db.execute(
                "SELECT key, name, status, reason, value, checksum FROM units WHERE key = ?", (key,)
            ).fetchone()
        return None if row is None else self._checked(row)

    def units(self) -> Iterator[Finished]:
        """All finished units in the order of their keys, each checked against its checksum.

        Raises:
            BadInputError: A row was damaged.
        """
        with _explained(self.path):
            rows = self._db.execute(
                "SELECT key, name, status, reason, value, checksum FROM units ORDER BY key"
            )
            for row in rows:
                yield self._checked(row)

    def _checked(self, row: tuple[Any, ...]) -> Finished:
        *fields, checksum = row
        if checksum != _checksum(*fields):
            raise _damaged(self.path, f"the row of unit {fields[1]!r} has a wrong checksum")
        key, name, _, reason, text = fields
        return Finished(key, name, json.loads(text), reason)

    def close(self) -> None:
        """Close the file; the last one to close it folds the write-ahead log into it."""
        with _explained(self.path):
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_kind(self) -> None:
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION:
            raise BadInputError(self.path, "an SQLite file, but not a store of strati; choose another folder")
        if version != SCHEMA:
            raise BadInputError(
                self.path, f"a store of version {version}, this strati reads {SCHEMA}; update strati"
            )
        verdict = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise _damaged(self.path, verdict)


def _create(path: Path, about: Mapping[str, Any]) -> None:
    """Build the store in a temporary file and link it to its path, so that no process sees an incomplete one."""
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        with _explained(path):
            db = sqlite3.connect(temporary, isolation_level=None)
            try:
                db.executescript(
                    f"PRAGMA application_id={APPLICATION}; PRAGMA user_version={SCHEMA}; {_TABLES}"
                )
                for key in sorted(about):
                    text = _text(about[key])
                    db.execute("INSERT INTO about VALUES (?, ?, ?)", (key, text, _checksum(key, text)))
            finally:
                db.close()
        try:
            os.link(temporary, path)
        except FileExistsError:
            return  # another process was quicker; its store is as good
    except OSError as error:
        raise BadInputError(
            path, f"cannot be created ({error.strerror or error}); choose another folder"
        ) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _check_file(path: Path) -> None:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadInputError(path, "not a regular file, so not a store; choose another folder")
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise BadInputError(path, f"cannot be read ({error.strerror or error})") from None
    if not head:
        raise BadInputError(path, "an empty file, not a store; delete it or choose another folder")
    if head != b"SQLite format 3\x00":
        raise BadInputError(
            path, "not a store of strati (no SQLite header); delete it or choose another folder"
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into one line each."""
    try:
        yield
    except StratiError:
        raise
    except sqlite3.Error as error:
        text = str(error)
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            why = "the disk is full; what was finished is kept, free some space and run the same command to resume"
            raise BadInputError(path, why) from None
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise BadInputError(path, f"cannot be written ({text}); choose another folder") from None
        if code == sqlite3.SQLITE_BUSY:
            raise BadInputError(
                path, f"another process held it for over {_BUSY_SECONDS:.0f} s; try again"
            ) from None
        if code == sqlite3.SQLITE_IOERR:
            why = f"could not be read or written ({text}); is the disk full? run the same command to resume"
            raise BadInputError(path, why) from None
        raise _damaged(path, text) from None


def _damaged(path: Path, how: str) -> BadInputError:
    return BadInputError(
        path, f"a damaged store ({how}); restore it from a copy, or delete it to start afresh"
    )


def _text(value: Any) -> str:
    return json.dumps(
        jsonable(value), sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":")
    )


def _checksum(*fields: object) -> str:
    text = json.dumps(
        fields, ensure_ascii=True, separators=(",", ":"), default=repr
    )  # damage may turn text to bytes
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Run:
    """Where and how the units of a long run are worked on.

    Args:
        engine: ``local`` or ``ray``.
        workers: Processes; with one, ``local`` works in this process; 0 for one per processor.
        address: The Ray cluster; ``None`` starts one here.
        retry: Try again the units that failed in an earlier run.
        tick: Called after each unit. A :class:`~strati.jobs.progress.Ticker` also gets the number of units, and knows
            the command that resumes the run.
    """

    engine: str = "local"
    workers: int = 1
    address: str | None = None
    retry: bool = False
    tick: Tick = silent

    def expect(self, total: int) -> None:
        """Announce how many units there will be."""
        as_ticker(self.tick).expect(total)

    def make_engine(self) -> Engine:
        """The function that runs units.

        Raises:
            BadInputError: No such engine, or options that do not go together.
        """
        if self.workers < 0:
            raise BadInputError("workers", "must be 0 (one per processor) or more")
        workers = self.workers or cores()
        if self.engine == "ray":
            from strati.jobs.ray_engine import run_ray

            return partial(run_ray, address=self.address, workers=workers if self.address is None else None)
        if self.engine != "local":
            raise BadInputError(self.engine, "no such engine; there are local and ray")
        if self.address is not None:
            raise BadInputError("address", "is the address of a Ray cluster; choose the engine ray")
        if workers == 1:
            return run_here
        from strati.jobs.process_engine import run_processes

        return partial(run_processes, workers=workers)


Keep = Callable[[Outcome], Finished]
"""Turns an outcome into the row to store; it may write files first."""


def drive(store: Store, body: Body, todo: Sequence[Unit], keep: Keep, run: Run) -> None:
    """Run units and store each outcome as it comes; units that another run finishes meanwhile are skipped."""
    for outcome in run.make_engine()(body, _unless_done(todo, store, run)):
        store.put(keep(outcome))
        run.tick(outcome.unit.name)


def _unless_done(todo: Sequence[Unit], store: Store, run: Run) -> Iterator[Unit]:
    before = store.keys()
    for unit in todo:
        if unit.key in before or unit.key not in store:
            yield unit
        else:
            run.tick(unit.name)


@contextmanager
def interruptible(count: Callable[[], int], run: Run) -> Iterator[None]:
    """Turn Ctrl-C into an error that says how many units are done and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(f"stopped, {count()} done", f"resume with {as_ticker(run.tick).resume}") from None


@contextmanager
def shared_folder(folder: Path) -> Iterator[bool]:
    """Create the folder; yields whether no other process works in it.

    Raises:
        BadInputError: The folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise BadInputError(
            folder, f"cannot be written to ({error.strerror or error}); choose another folder"
        ) from None
    try:
        yield lock(handle, wait=False)
    finally:
        os.close(handle)


def open_store(
    path: Path, *, identity: str, layout: int, about: dict[str, Any], kind: str = "study"
) -> Store:
    """Open or create the store of a resumable run.

    Args:
        path: The store's file.
        identity: Hash of everything that the rows depend on; a store with another identity holds another run.
        layout: Version of the rows' meaning and columns; rows of another version are refused.
        about: Further facts to record in the store.
        kind: What the store holds, for messages.

    Raises:
        BadInputError: The folder holds another run, or one whose rows another strati wrote with other meanings.
    """
    store = Store(path, about=about | {"identity": identity, "format": layout})
    there = store.about()
    if there.get("format", 1) != layout:
        store.close()
        why = (
            f"holds rows of format {there.get('format', 1)}, this strati writes format {layout}; "
            "choose another folder, or delete this one"
        )
        raise BadInputError(path.parent, why)
    if there.get("identity") != identity:
        store.close()
        why = (
            f"holds another {kind} (its spec, seed or data differ); choose another folder, or delete this one"
        )
        raise BadInputError(path.parent, why)
    return store


def run_cached(
    path: Path, units: Sequence[Unit], body: Body, keep: Keep, run: Run, *, holds: str, layout: int
) -> Iterator[Any]:
    """The values of units in their order, each computed once and stored; several runs may share the store.

    A second run at the same time starts at the other end, so that the two meet in the middle.

    Args:
        path: The store's file; its folder is created if necessary.
        units: The work; a unit whose key is in the store is not computed again.
        body: Computes one unit.
        keep: Turns an outcome into the row to store.
        run: Where the work is done.
        holds: What the store is for; a store for something else is refused.
        layout: Version of the values' meaning.

    Raises:
        BadInputError: The folder holds something else or cannot be written, or a unit failed.
        StoppedError: Ctrl-C; finished units are stored.
    """
    keys = {unit.key for unit in units}
    with (
        shared_folder(path.parent) as alone,
        open_store(path, identity=holds, layout=layout, about={"holds": holds}, kind="run") as store,
        interruptible(lambda: len(store.keys(failed=False) & keys), run),
    ):
        done = store.keys(failed=False)
        todo = [unit for unit in units if unit.key not in done]
        run.expect(len(todo))
        drive(store, body, todo if alone else todo[::-1], keep, run)
        for unit in units:
            finished = store.get(unit.key)
            if finished is None or finished.reason is not None:
                why = (
                    finished.reason
                    if finished is not None and finished.reason
                    else "was not computed; run it again"
                )
                raise BadInputError(unit.name, why)
            yield finished.value
