"""File systems that Spark reaches and Python does not, each over a directory of this machine.

They need no server. What they do with a rename differs, and so does Spark's way of using them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Mount:
    """A directory as Spark reaches it."""

    scheme: str
    folder: Path
    settings: dict[str, str]
    """The settings of a session that make it reachable."""

    @property
    def location(self) -> str:
        """The directory's location for Spark."""
        return f"{self.scheme}://statelog/here" if self.scheme != KEEPING else f"{self.scheme}:{self.folder}"

    def of(self, path: Path) -> str:
        """The location of a path below the directory."""
        return f"{self.location}/{path.relative_to(self.folder)}"


VIEW: Final = "viewfs"
"""Hadoop's view of other file systems. Spark uses it by Hadoop's newer interface, whose renames replace files."""
SHELF: Final = "shelf"
"""The same view with a name of its own, which Hadoop's newer interface does not know: Spark uses the older one.

Its renames replace no file, as those of some object stores.
"""
KEEPING: Final = "keeps"
"""A file system that does the same without a view, and has no host; only :func:`mounted` knows it."""


def mount(scheme: str, folder: Path) -> Mount:
    """A directory as Spark reaches it by a scheme, once its session has the settings."""
    link = {"fs.viewfs.mounttable.statelog.link./here": f"file:{folder}", f"fs.{scheme}.impl.disable.cache": "true"}
    settings = {
        VIEW: link,
        SHELF: {
            **link,
            "fs.shelf.impl": "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme",
            "fs.viewfs.overload.scheme.target.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
        },
        KEEPING: {"fs.keeps.impl": "KeepingFileSystem", "fs.keeps.impl.disable.cache": "true"},
    }
    return Mount(scheme, folder, settings[scheme])


@contextmanager
def mounted(session: SparkSession, scheme: str, folder: Path) -> Iterator[Mount]:
    """A directory as a session reaches it by a scheme."""
    made = mount(scheme, folder)
    if scheme == KEEPING:
        _compile(session)
    for name, value in made.settings.items():
        session.conf.set(name, value)
    yield made
    for name in made.settings:
        session.conf.unset(name)


_KEEPING_FILE_SYSTEM: Final = """
import java.io.IOException;
import java.net.URI;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;

public class KeepingFileSystem extends LocalFileSystem {
    public KeepingFileSystem() { super(new Raw()); }

    public String getScheme() { return "keeps"; }

    public static class Raw extends RawLocalFileSystem {
        public URI getUri() { return URI.create("keeps:///"); }

        public boolean rename(Path source, Path target) throws IOException {
            return (target.getName().endsWith(".crc") || !exists(target)) && super.rename(source, target);
        }
    }
}
"""


def _compile(session: SparkSession) -> None:
    """Add the file system to the classes that the session's Hadoop finds, by the compiler that Spark has for itself."""
    jvm: Any = session._jvm
    context: Any = session.sparkContext._jsc
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.cook(_KEEPING_FILE_SYSTEM)
    context.hadoopConfiguration().setClassLoader(compiler.getClassLoader())
