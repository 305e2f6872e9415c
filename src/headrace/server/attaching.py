"""Opening of a service with its engine, and with what the model can do besides text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..speech.finding import listens, sees
from .service import Service, writes

if TYPE_CHECKING:
    from ..engine.clients.face import ServingEngine
    from ..engine.hearing.engine import HearingEngine


def attach(service: Service, engine: ServingEngine | HearingEngine) -> None:
    """Attach the ready engine: from now on requests are served.

    Imports are local: a server of a text model does without the dependencies of the others.
    """
    if not writes(engine):
        from .hearing.ears import HearingRoutes

        service.hear_with(HearingRoutes(service, engine))
        return
    service.open(engine)
    if (engine.files.path / "speech.json").is_file():
        from .speaking import SpeakingRoutes

        service.speak_with(SpeakingRoutes(service, engine))
    if listens(engine.files.path):
        from ..speech.prompts import open_prompts

        service.sounds = open_prompts(engine.files)
    if sees(engine.files.path):
        pictures = import_module("headrace.engine.clients.pictures")
        service.pictures = pictures.open_picture_prompts(engine.files, engine.tokenizer)
