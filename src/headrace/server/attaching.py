"""Attachment of a ready engine to a service, with the model's abilities besides text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ..base.errors import OptionError
from ..engine.clients.group import EngineGroup
from ..speech.finding import listens, sees
from ..text import Foreign
from .residents import Residents
from .service import Service, runs_programs, writes

if TYPE_CHECKING:
    from ..engine.clients.face import ServingEngine
    from ..engine.hearing.engine import HearingEngine
    from ..engine.programs.engine import ProgramEngine


def attach(
    service: Service,
    engine: ServingEngine | HearingEngine | EngineGroup | ProgramEngine,
    programs: ProgramEngine | None = None,
) -> None:
    """Attach the ready engine, or a group of models; requests are served from now on. `programs`:
    foreign programs served in addition. Raises `OptionError` if one has a model's name.

    Imports are local: a server of a text model does without the dependencies of the others.
    """
    if programs is not None:
        _run_programs(service, programs, alone=False)
    if isinstance(engine, EngineGroup):
        for number, member in engine.members.items():
            one = service
            if number:
                one = service.beside()
                service.models.append(one)
            attach_model(one, member, engine.chosen[number].names)
        service.residents = Residents(service, engine, attach_model)
    elif runs_programs(engine):
        _run_programs(service, engine, alone=True)
    else:
        attach_model(service, engine)
    if programs is not None and (both := programs.programs.keys() & set(service.all_names)):
        why = f"a program and a model would both be served as {min(both)}; name the model otherwise"
        raise OptionError(why, param="programs")


def _run_programs(service: Service, engine: ProgramEngine, *, alone: bool) -> None:
    from .inference import ProgramRoutes

    service.run_with(ProgramRoutes(service, engine), alone=alone)
    _speak(service, None)


def _speak(service: Service, engine: ServingEngine | None) -> None:
    """Serve the voices of the programs, and those of this model, if there are any."""
    programs = None if service.programs is None else service.programs.engine
    if engine is None and not (programs and any(one.voice for one in programs.programs.values())):
        return
    from .speaking import SpeakingRoutes

    service.speak_with(SpeakingRoutes.of(service, engine, programs))


def attach_model(
    service: Service, engine: ServingEngine | HearingEngine, names: Sequence[str] = ()
) -> None:
    """Attach a model's engine and its other abilities under these names (see `Service.open`)."""
    if not writes(engine):
        from .hearing.ears import HearingRoutes

        service.hear_with(HearingRoutes(service, engine), names)
        return
    service.open(engine, names)
    speaks = (engine.files.path / "speech.json").is_file()
    _speak(service, engine if speaks else None)
    if "inputs" not in getattr(engine, "features", ()):
        return  # With a draft model, on a GPU or on several ranks there is no encoder.
    if listens(engine.files.path):
        from ..speech.prompts import open_prompts

        service.sounds = open_prompts(engine.files)
    if sees(engine.files.path):
        pictures = import_module("headrace.engine.clients.pictures")
        service.pictures = pictures.open_picture_prompts(engine.files, engine.tokenizer)
    places = [] if service.sounds is None else [service.sounds.place]
    places += [] if service.pictures is None else service.pictures.places
    names = [engine.tokenizer.id_to_token(place) for place in places]
    service.places = Foreign((name for name in names if name), everywhere=True)
