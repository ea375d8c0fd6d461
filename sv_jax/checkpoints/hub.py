"""Models of a model hub, fetched with huggingface_hub into its own cache."""

from __future__ import annotations

import re
from pathlib import Path

from sv_jax.config import UserError

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
# Nothing that could hold code or pickles is even downloaded.
ALLOWED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")
IGNORED = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.py")


def is_hub_id(model: str) -> bool:
    """Whether `model` is written like "org/name"."""
    return REPOSITORY.fullmatch(model) is not None


def fetch(model: str) -> Path:
    """Local directory of the hub model "org/name" (downloaded if it is not in the hub's cache).

    Raises UserError that says what to do: gated model, missing token, unknown name, no network.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, allow_patterns=list(ALLOWED), ignore_patterns=list(IGNORED)
            )
        )
    except errors.GatedRepoError as error:
        raise UserError(
            f"{model!r} is gated: accept its licence on its page, then run `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{model!r} is not on the hub, or it is private: check the name; for a private model run "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"{model!r} needs a token: run `hf auth login` or set HF_TOKEN") from error
    except errors.LocalEntryNotFoundError as error:  # before HfHubHTTPError, which it may derive from
        raise _unreachable(model, error) from error
    except errors.HfHubHTTPError as error:
        raise UserError(f"the hub refused {model!r}: {_first_line(error)}") from error
    except errors.HFValidationError as error:
        raise UserError(f"{model!r} is not a valid hub id: {_first_line(error)}") from error
    except OSError as error:
        raise _unreachable(model, error) from error
    except Exception as error:  # the HTTP client underneath has changed before; its errors are not the hub's
        raise UserError(f"{model!r} could not be fetched from the hub: {_first_line(error)}") from error


def _unreachable(model: str, error: Exception) -> UserError:
    return UserError(
        f"{model!r} is not in the local hub cache and the hub cannot be reached ({_first_line(error)}); "
        "go online, or name a local directory or .gguf file"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
