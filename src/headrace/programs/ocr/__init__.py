"""Steps of reading text in pictures between the runs of PP-OCR's programs, in numpy alone.

Owns: sizes and numbers that the detector, the classifier and the reader take, boxes of the
detector's map, crops along them, texts of the reader's odds. Runs nothing: `engine.programs.ocr`
does. Rules and thresholds are those of PP-OCRv4 (PaddleOCR) as RapidOCR 1.4 has them, whose lines
are the oracle of the tests.

Invariant: whatever the programs answer, time and memory are bounded by the picture's size.
"""
