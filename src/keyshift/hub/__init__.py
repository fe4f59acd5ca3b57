"""The Hugging Face hub: model cards, and checkpoints uploaded with the code that loads them."""

from keyshift.hub.card import model_card
from keyshift.hub.push import Upload, plan_upload, upload

__all__ = ["Upload", "model_card", "plan_upload", "upload"]
