"""The prompts of the two vision applications, as the paper gives them (V-LoRA, appendix C, figure 25)."""

from __future__ import annotations

CAPTION = "Generate the caption in English:"
ACTION = "Please analyze the consecutive frames sequence and identify the actions occurring in the video."


def ground(phrase: str) -> str:
    """Ask for the place of something described in words (referring expression task)."""
    return f"Circle the {phrase} position on the picture."


def detect(target: str) -> str:
    """Ask for all objects of a kind (object detection task)."""
    return f"Please box all the objects in the picture that you think are {target}."


def count(target: str) -> str:
    """Ask how many there are (visual question answering task)."""
    return f"How many {target} are there in the image?"
