"""Files of models on the Hugging Face hub. Cached files are not fetched again, nor need the hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl_tinker.errors import StartupError

_DESCRIPTION = ("*.json", "*.txt", "*.jinja")
_WEIGHTS = ("*.safetensors",)
_SAME_AGAIN = ("consolidated*",)  # the weights once more, in Mistral's own format


def fetch_description(name: str) -> Path:
    """Fetch config, tokenizer and templates; return their directory.

    Raises StartupError when the hub has no such model or gives none of it.
    """
    return Path(_fetch(name, allow_patterns=[*_DESCRIPTION])).resolve()


def fetch_weights(
    name: str, directory: Path, report: Callable[[int, int], None] = lambda done, size: None
) -> None:
    """Fetch the weights that belong to a description's directory; an earlier try goes on.

    `report` receives the bytes that are here and those of all files to fetch. Raises as above.
    """
    wanted = {"revision": directory.name, "allow_patterns": [*_WEIGHTS]}
    size = _size_to_fetch(name, wanted)
    if size != 0:
        report(0, size or 0)
        _fetch(name, lambda done: report(done, max(done, size or 0)), **wanted)


def _size_to_fetch(name: str, wanted: dict[str, Any]) -> int | None:
    """Return the bytes that the cache lacks, None when the hub cannot be asked."""
    from huggingface_hub.errors import DryRunError

    try:
        files = _fetch(name, **wanted, dry_run=True)
    except DryRunError:
        return None
    return sum(file.file_size or 0 for file in files if file.will_download)


def _fetch(name: str, report: Callable[[int], None] = lambda done: None, **wanted: Any) -> Any:
    from huggingface_hub import snapshot_download  # only a hub name needs it
    from huggingface_hub.errors import DryRunError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(
            name, ignore_patterns=[*_SAME_AGAIN], tqdm_class=_silent_bar(report), **wanted
        )
    except DryRunError:
        raise
    except LocalEntryNotFoundError as error:
        raise StartupError(
            f"--base-model {name}: not a model directory, and the hub cannot be reached "
            f"({str(error).splitlines()[0]}): set HF_ENDPOINT to a mirror, or give a directory; for `plan` "
            "one with config.json is enough"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise StartupError(
            f"--base-model {name}: not a model directory, and the hub download failed "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def _silent_bar(report: Callable[[int], None]) -> type:
    """Make progress bars that draw nothing; the furthest of them, which count bytes, is reported."""
    from tqdm import tqdm

    counts: list[tqdm[Any]] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))
            if options.get("unit") == "B":  # another one counts files
                counts.append(self)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self in counts:
                report(int(max(bar.n for bar in counts)))

    return Bar
