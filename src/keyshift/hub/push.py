"""A checkpoint to the Hugging Face hub: looked at, staged, uploaded."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyshift.errors import RunError, UserError, first_line
from keyshift.hub.card import card_of, is_untouched
from keyshift.hub.carried import AUTO_MAP, carried_files
from keyshift.hub.contents import Contents, read_contents
from keyshift.hub.measured import read_scores

CARD = "README.md"
REPLACED = ["*.safetensors", "*.safetensors.index.json", "keyshift_*.py", "modeling_keyshift.py"]
"""What of a former upload would be loaded in place of, or beside, this one's."""
SIGN_IN = "sign in with `hf auth login`, or set HF_TOKEN to a token that may write"


@dataclass(frozen=True)
class Upload:
    """What would be uploaded.

    Attributes:
        written: names and contents of what is not in the folder as it goes: card, configuration, code.
        own_card: whether the card is the user's, from the folder.
    """

    repo: str
    contents: Contents
    written: dict[str, str]
    own_card: bool

    @property
    def card(self) -> str:
        """The README.md that goes."""
        return (self.contents.folder / CARD).read_text() if self.own_card else self.written[CARD]

    @property
    def left_out(self) -> list[str]:
        """Names of what stays in the folder."""
        return [name for name in self.contents.left_out if name not in self.written]

    def sizes(self) -> dict[str, int]:
        """Bytes of every file that goes, by name."""
        folder = self.contents.folder
        copied = {name: (folder / name).stat().st_size for name in self.contents.files}
        return dict(
            sorted({**copied, **{name: len(text.encode()) for name, text in self.written.items()}}.items())
        )

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """A folder of these files, for as long as the context lasts; weights are linked, not copied."""
        with tempfile.TemporaryDirectory(prefix="keyshift-push-") as name:
            for file in self.contents.files:
                if file not in self.written:
                    (Path(name) / file).symlink_to((self.contents.folder / file).resolve())
            for file, text in self.written.items():
                (Path(name) / file).write_text(text, encoding="utf-8")
            yield Path(name)


def plan_upload(folder: Path, repo: str, *, results: Path | None = None, remote_code: bool = True) -> Upload:
    """Look at a folder and say what would go; nothing is written, no network is needed.

    Args:
        repo: ``name`` or ``owner/name``.
        results: of ``keyshift eval``, for the card.
        remote_code: whether the model's code goes along, for those who have no keyshift.

    Raises:
        UserError: what `read_contents` and `read_scores` refuse; a name that no repository can have; results
            for a folder with a card of its own.
    """
    _check_name(repo)
    folder = folder.expanduser()
    contents = read_contents(folder)
    own_card = CARD in contents.files
    if own_card and results is not None:
        raise UserError(
            f"--results goes into the card, and {folder / CARD} is yours; put them there, or move it away"
        )
    scores = [] if results is None else read_scores(results, folder)
    written = {"config.json": _config(folder, remote_code)}
    if not own_card:
        written[CARD] = card_of(contents, repo, scores, remote_code)
    if remote_code:
        written |= carried_files()
    return Upload(repo, contents, written, own_card)


def _config(folder: Path, remote_code: bool) -> str:
    """The folder's config.json, which says where the code is, or no longer does."""
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    content.pop("auto_map", None)
    if remote_code:
        content["auto_map"] = AUTO_MAP
    return json.dumps(content, indent=2) + "\n"


def _check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"REPO {repo!r} is no name of a repository: {first_line(error)}") from error


def upload(
    planned: Upload,
    *,
    private: bool = False,
    revision: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Make the repository if it is not there and upload; the library shows its own progress.

    A README.md in the repository that somebody wrote or changed stays, unless the folder has one. Weights and
    code of a former upload that this one has not are deleted.

    Args:
        private: the repository's, if it is made; one that is there and public is refused.
        revision: the branch, made if it is not there; None is the main one.
        say: hears what was decided on the way.

    Returns:
        The address of the repository.

    Raises:
        UserError: no token, or one that may not do this; a public repository in place of a private one.
        RunError: no network, or the hub could not.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise UserError(f"no token for the hub: {SIGN_IN}")
    api = HfApi(library_name="keyshift")
    with _explained(planned.repo), planned.staged() as folder:
        made = api.create_repo(planned.repo, private=private or None, exist_ok=True)
        if private and not api.model_info(made.repo_id).private:
            raise UserError(
                f"REPO {made.repo_id!r} exists and is public; leave --private out, or take another name"
            )
        if revision is not None:
            api.create_branch(made.repo_id, branch=revision, exist_ok=True)
        if not planned.own_card and _has_foreign_card(api, made.repo_id, revision):
            (folder / CARD).unlink()
            say(f"{CARD} of {made.repo_id} was written or changed by somebody, and stays")
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            revision=revision,
            commit_message="keyshift push",
            delete_patterns=REPLACED,
        )
    return str(made)


def _has_foreign_card(api: Any, repo: str, revision: str | None) -> bool:
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return not is_untouched(Path(api.hf_hub_download(repo, CARD, revision=revision)).read_text())
    except EntryNotFoundError:
        return False


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Whatever the hub or the network have to say, in one line."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (UserError, RunError):
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise UserError(f"the hub does not accept the token: {SIGN_IN}") from error
        if status == 403:
            raise UserError(f"REPO {repo!r}: this token may not write there; {SIGN_IN}") from error
        raise RunError(f"the hub answered {status} for REPO {repo!r}: {first_line(error)}") from error
    except Exception as error:
        raise RunError(f"the hub cannot be reached for REPO {repo!r}: {first_line(error)}") from error
