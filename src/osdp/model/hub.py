"""Names of the Hugging Face Hub: a model's config.json, from the local cache or else the Hub, and nothing more."""

from __future__ import annotations

import re
from pathlib import Path

from osdp.errors import UsageError

_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def is_hub_id(spec: str) -> bool:
    """Whether a text reads as ORG/NAME and not as a path: no file ending, and no folder of the first name here."""
    if not _NAME.fullmatch(spec) or spec.endswith(".json"):
        return False
    organisation = spec.partition("/")[0]
    return organisation not in (".", "..") and not Path(organisation).exists()


def config_of(spec: str) -> Path:
    """The config.json of a model on the Hub, in the local cache."""
    try:
        from huggingface_hub import constants, get_session, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError as NoFile
        from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError
        from huggingface_hub.errors import RepositoryNotFoundError as NoModel
    except ImportError:
        raise UsageError(f"{spec} needs huggingface_hub: pip install osdp-torch[hf]") from None
    try:
        return Path(hf_hub_download(spec, "config.json", local_files_only=True))
    except HFValidationError as error:
        raise UsageError(f"{spec!r} is no name of the Hub ({error}); give ORG/NAME, or a config.json") from None
    except LocalEntryNotFoundError:
        pass
    elsewhere = "give the path of its config.json"
    unreachable = (
        f"{spec}: there is no such file or folder here, it is not in the local cache, and the Hub cannot be reached;"
        f" run `hf download {spec} config.json` where it can be, or {elsewhere}"
    )
    try:
        get_session().head(constants.ENDPOINT, timeout=5)  # a download would try for half a minute
    except Exception:  # the network's errors are of many types
        raise UsageError(unreachable) from None
    try:
        return Path(hf_hub_download(spec, "config.json", etag_timeout=5))
    except GatedRepoError:
        raise UsageError(
            f"{spec} asks for your consent on the Hub first: log in with `hf auth login`, or {elsewhere}"
        ) from None
    except NoModel:
        raise UsageError(f"the Hub has no model {spec}, or it is private; correct the name, or {elsewhere}") from None
    except LocalEntryNotFoundError:
        raise UsageError(unreachable) from None
    except NoFile:
        raise UsageError(f"{spec} has no config.json on the Hub; {elsewhere}") from None
    except Exception as error:  # the network's errors are of many types
        line = " ".join(str(error).split())[:120]
        raise UsageError(
            f"{spec} is not in the local cache and the Hub answered {type(error).__name__} ({line}); try again, or"
            f" {elsewhere}"
        ) from None
