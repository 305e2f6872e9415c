"""Opening of a service with its engine, and with what the model can do besides text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..speech.finding import listens
from .service import Service, runs_programs, writes

if TYPE_CHECKING:
    from ..engine.clients.face import ServingEngine
    from ..engine.hearing.engine import HearingEngine
    from ..engine.programs.engine import ProgramEngine


def attach(
    service: Service,
    engine: ServingEngine | HearingEngine | ProgramEngine,
    programs: ProgramEngine | None = None,
) -> None:
    """Attach the ready engine: from now on requests are served. `programs`: foreign programs that
    are served beside it.

    Imports are local: a server of a text model does without the dependencies of the others.
    """
    alone = runs_programs(engine)
    if (beside := engine if runs_programs(engine) else programs) is not None:
        from .inference import ProgramRoutes

        service.run_with(ProgramRoutes(service, beside), alone=alone)
    if runs_programs(engine):
        return
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
