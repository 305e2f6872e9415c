"""The tiny models of all tests: random weights in the layouts of the hub and of GGUF, small enough
to be made in a moment, each by one function that takes the folder or the file to write.

| module | what it makes |
|---|---|
| `families` | every family as `transformers` has it, in bf16, for tests that speak in token ids |
| `checkpoints` | any class of `transformers` at its smallest, for tests of files |
| `gguf_files` | the same as GGUF, and GGUF of metadata and arrays |
| `encoder` | encoders with WordPiece, with and without a head |
| `bytewise` | a Llama whose tokens are bytes, for tests of the engine |
| `talker` | a Llama with a trained vocabulary and ChatML, for tests of whole servers |

Who only reads a model asks the fixture `kept` for it, which has each made once in a run; who
changes one makes it in a folder of its own.
"""
