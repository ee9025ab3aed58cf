"""How JupyterLab reads and writes the course's notebooks, so that opening one changes nothing.

JupyterLab writes its kernel's `language_info` into a notebook, and calls it changed, as soon as the
two differ. Built files have what every kernel says, without the version, which is another one on
each machine. Here the version comes in when a file of the course is read, and goes out when it is
written. So a file that was only looked at stays as it is, and an update of the course meets no
conflict.
"""

import sys

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

from minikv.classroom.files import NOTEBOOK_METADATA

VERSION = sys.version.split()[0]  # as ipykernel says it


class CourseContents(AsyncLargeFileManager):
    async def get(self, path, *args, **options):
        model = await super().get(path, *args, **options)
        if info := _course_language(model):
            info["version"] = VERSION
        return model

    async def save(self, model, path=""):
        if info := _course_language(model):
            info.pop("version", None)
        return await super().save(model, path)


def _course_language(model):
    """The language_info of a notebook of the course, as a built file has it; else None."""
    content = model.get("content")
    if model.get("type") != "notebook" or not isinstance(content, dict):
        return None
    metadata = content.get("metadata", {})
    info = metadata.get("language_info")
    ours = "minikv" in metadata and isinstance(info, dict)
    own = NOTEBOOK_METADATA["language_info"]
    return info if ours and {k: v for k, v in info.items() if k != "version"} == own else None
