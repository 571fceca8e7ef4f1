"""The tables of an audit store, the seal of a row, and the upgrade of stores that an earlier version made."""

import hashlib
import sqlite3

VERSION, BEFORE = 3, 2
APPLICATION_ID = 0x484F4C44  # "HOLD": tells our files from other SQLite files
_SEAL = ", seal TEXT NOT NULL"
TABLES = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "outcome": """CREATE TABLE outcome (
        bracket INTEGER NOT NULL, step INTEGER NOT NULL, level INTEGER NOT NULL, position INTEGER NOT NULL,
        passed INTEGER NOT NULL, prediction INTEGER, by TEXT NOT NULL, size REAL, seal TEXT NOT NULL,
        PRIMARY KEY (bracket, step, level, position)) WITHOUT ROWID""",
    "example": """CREATE TABLE example (
        bracket INTEGER NOT NULL, position INTEGER NOT NULL, size REAL NOT NULL, shape TEXT NOT NULL,
        dtype TEXT NOT NULL, x BLOB NOT NULL, x_adv BLOB NOT NULL, seal TEXT NOT NULL,
        PRIMARY KEY (bracket, position))""",
    "batch": """CREATE TABLE batch (
        bracket INTEGER NOT NULL, step TEXT NOT NULL, inputs INTEGER NOT NULL, seconds REAL NOT NULL,
        wall REAL NOT NULL, seal TEXT NOT NULL)""",
    "trust": "CREATE TABLE trust (bracket INTEGER PRIMARY KEY, text TEXT NOT NULL, seal TEXT NOT NULL)",
}
SEALED = {"outcome": "bracket, step, level, position", "example": "rowid", "batch": "rowid", "trust": "bracket"}
"""Tables whose rows have seals, and the order of their rows."""


def has_tables(db: sqlite3.Connection, version: int) -> bool:
    """Whether the file holds the tables of that version and nothing else: a view or a trigger could run for ever."""
    found = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    known = [" ".join(sql.split()) for sql in TABLES.values()]
    if version == BEFORE:
        known = [sql.replace(_SEAL, "") for sql in known]
    return sorted(" ".join(row[0].split()) for row in found) == sorted(known)


def seal_key(fingerprint: str) -> bytes:
    """Key of all seals of a store, from the fingerprint as the store holds it."""
    return hashlib.sha256(fingerprint.encode()).digest()


def sealed(key: bytes, table: str, *row: object) -> tuple[object, ...]:
    """The row with its seal, a checksum of the table and the values, as the last value."""
    found = hashlib.blake2b(key=key, digest_size=8)
    for value in (table, *row):
        part = value if isinstance(value, bytes) else repr(value).encode(errors="backslashreplace")
        found.update(len(part).to_bytes(8, "little") + part)
    return (*row, found.hexdigest())


def create(db: sqlite3.Connection) -> None:
    """Make the tables; within a transaction of the caller's."""
    for statement in TABLES.values():
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def upgrade(db: sqlite3.Connection, key: bytes) -> None:
    """Turn tables of version 2 into tables of version 3; within a transaction of the caller's.

    Version 2 had no seals. A store that was edited cannot be told from a good one there, so what a seal vouches for
    begins with the upgrade.
    """
    for table, order in SEALED.items():
        db.execute(f"ALTER TABLE {table} RENAME TO {table}_before")
        db.execute(TABLES[table])
        rows = db.execute(f"SELECT * FROM {table}_before ORDER BY {order}")
        marks = ", ".join("?" * (len(rows.description) + 1))
        db.executemany(f"INSERT INTO {table} VALUES ({marks})", (sealed(key, table, *row) for row in rows))
        db.execute(f"DROP TABLE {table}_before")
    db.execute(f"PRAGMA user_version = {VERSION}")
