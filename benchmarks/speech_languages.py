"""Word errors in six languages that espeak-ng speaks, beside transformers on the same weights.

Run: `python -m benchmarks.speech_languages` (needs espeak-ng, PyTorch, transformers, and the extra
`audio`). Texts of our own are spoken by three voices for each language, and heard by Headrace in
eight bits (the default), by Headrace with weights as the file has them, and by transformers' own
algorithm in fp32; the language is given, decoding is greedy, no other temperatures are tried.
Errors are counted over words without case or punctuation. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.speech.whisper_oracle import in_transformers, long_form

from headrace.bench.word_errors import word_errors
from headrace.loader.catalog import CATALOG
from headrace.loader.download import fetch_catalog
from headrace.media import decode
from headrace.speech.decoding import DecodingOptions
from headrace.speech.opening import open_transcriber

RESULTS = Path(__file__).parent / "results" / "speech_languages.json"
VARIANTS = ("", "+f3", "+m3")
TEXTS = {
    "en": (
        "en-us",
        "The old mill stands by the river, a few miles outside the town. Every summer the "
        "owner opens the gates so that children can see how the water turns the wheel. Last "
        "year more than two thousand visitors came, and most of them bought a bag of flour. "
        "The money pays for repairs in the winter, when the road is often closed because of "
        "the snow.",
    ),
    "de": (
        "de",
        "Die alte Mühle steht am Fluss, einige Kilometer vor der Stadt. Jeden Sommer öffnet "
        "der Besitzer die Tore, damit die Kinder sehen können, wie das Wasser das Rad dreht. "
        "Im letzten Jahr kamen mehr als zweitausend Besucher, und die meisten kauften einen "
        "Sack Mehl. Das Geld reicht für die Arbeiten im Winter, wenn die Straße wegen des "
        "Schnees oft gesperrt ist.",
    ),
    "fr": (
        "fr-fr",
        "Le vieux moulin se trouve au bord de la rivière, à quelques kilomètres de la ville. "
        "Chaque été, le propriétaire ouvre les portes pour que les enfants voient comment "
        "l'eau fait tourner la roue. L'année dernière, plus de deux mille visiteurs sont "
        "venus, et la plupart ont acheté un sac de farine. L'argent paie les travaux de "
        "l'hiver, quand la route est souvent fermée à cause de la neige.",
    ),
    "es": (
        "es",
        "El viejo molino está junto al río, a pocos kilómetros de la ciudad. Cada verano el "
        "dueño abre las puertas para que los niños vean cómo el agua mueve la rueda. El año "
        "pasado llegaron más de dos mil visitantes, y la mayoría compró una bolsa de harina. "
        "El dinero paga los trabajos del invierno, cuando la carretera está cerrada muchas "
        "veces por la nieve.",
    ),
    "it": (
        "it",
        "Il vecchio mulino si trova vicino al fiume, a pochi chilometri dalla città. Ogni "
        "estate il padrone apre le porte, così i bambini possono vedere come l'acqua fa "
        "girare la ruota. L'anno scorso sono venuti più di duemila visitatori, e quasi tutti "
        "hanno comprato un sacco di farina. Il denaro serve per i lavori dell'inverno, quando "
        "la strada è spesso chiusa per la neve.",
    ),
    "pl": (
        "pl",
        "Stary młyn stoi nad rzeką, kilka kilometrów za miastem. Każdego lata właściciel "
        "otwiera bramę, żeby dzieci mogły zobaczyć, jak woda obraca koło. W zeszłym roku "
        "przyszło ponad dwa tysiące gości i większość z nich kupiła worek mąki. Pieniądze "
        "wystarczają na prace zimą, kiedy droga jest często zamknięta z powodu śniegu.",
    ),
}


def spoken(voice: str, text: str, path: Path) -> np.ndarray:
    subprocess.run(["espeak-ng", "-v", voice, "-s", "140", "-w", path, text], check=True)
    return decode(path.read_bytes()).samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    folder = fetch_catalog(CATALOG["whisper-base"])
    ours = {kind: open_transcriber(str(folder), given.threads, kind) for kind in ("int8", "exact")}
    oracle = in_transformers(ours["exact"].network.files)
    tokenizer = ours["exact"].network.files.tokenizer
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as place:
        for language, (voice, text) in TEXTS.items():
            found = counts[language] = dict.fromkeys(("words", *ours, "transformers"), 0)
            found["same_text"] = 0
            for variant in VARIANTS:
                samples = spoken(voice + variant, text, Path(place) / "a.wav")
                options = DecodingOptions(language=language, temperatures=(0.0,))
                texts = {kind: one.transcribe(samples, options).text for kind, one in ours.items()}
                tokens = long_form(oracle, samples, language)
                texts["transformers"] = tokenizer.decode(tokens, skip_special_tokens=True)
                found["words"] += word_errors(text, "").said
                for name, heard in texts.items():
                    found[name] += word_errors(text, heard).wrong
                found["same_text"] += texts["exact"].split() == texts["transformers"].split()
            print(language, json.dumps(found), flush=True)
    total: dict[str, Any] = {
        name: sum(one[name] for one in counts.values()) for name in counts["en"]
    }
    result = {"voices": VARIANTS, "languages": counts, "all": total}
    result["wer"] = {name: total[name] / total["words"] for name in (*ours, "transformers")}
    print(json.dumps(result["wer"]))
    given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
