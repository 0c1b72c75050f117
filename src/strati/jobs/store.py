"""The store of finished units: one SQLite file that survives being killed at any moment.

One row per finished unit, one transaction per row, keyed by the hash of the unit's full configuration and
guarded by a checksum (SQLite's own check does not see a flipped byte inside a value). Knows nothing of what
the units compute; arrays too large for a row are files beside it, written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strati.core.errors import BadInputError, StratiError
from strati.core.results import jsonable

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
