"""Hundreds of files are written: nobody waits for the disk."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def unsynchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
