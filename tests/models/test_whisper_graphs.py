"""The two graphs of a Whisper: the tensors they name, the groups they keep, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.base.errors import EngineFault
from headrace.base.graph import AttentionSpec, Graph
from headrace.base.groups import block_bytes, cross_groups, graph_groups
from headrace.base.slices import slices
from headrace.base.verify import verify
from headrace.models.whisper import WhisperArch, describe_decoder, describe_encoder

ARCH = WhisperArch(128, encoder_layers=3, decoder_layers=2, mels=80, vocab=500)


def test_what_the_encoder_writes_is_what_the_decoder_reads() -> None:
    written = [
        node.spec.layer
        for node in describe_encoder(ARCH).nodes
        if node.kind == "write" and isinstance(node.spec, AttentionSpec)
    ]
    (own,) = graph_groups(describe_decoder(ARCH), "int8")
    (cross,) = cross_groups(describe_decoder(ARCH), "int8", 1)
    assert list(cross.layers) == written == [3, 4]
    assert (own.kind, cross.kind) == ("full", "cross")
    assert block_bytes(own, 16) == block_bytes(cross, 16) == 16 * 2 * 2 * 2 * (64 + 2)


def test_no_tensor_is_two_things() -> None:
    encoder, decoder = describe_encoder(ARCH).tensors(), describe_decoder(ARCH).tensors()
    assert not encoder.keys() & decoder.keys()
    assert encoder["model.encoder.conv1.weight"] == (128, 240)
    assert encoder["model.decoder.layers.1.encoder_attn.kv_proj.weight"] == (256, 128)
    assert decoder["model.decoder.embed_positions.weight"] == (448, 128)


def test_a_run_may_stop_after_each_half_of_a_layer_and_each_k_and_v_that_is_written() -> None:
    graph = describe_encoder(ARCH)
    *firsts, end = slices(graph)
    assert len(firsts) == 1 + 2 * ARCH.encoder_layers + ARCH.decoder_layers
    assert end == len(graph.nodes)


def test_attention_across_reads_what_others_write() -> None:
    graph = describe_decoder(ARCH)
    nodes = [
        replace(node, spec=node.spec._replace(layer=0))
        if isinstance(node.spec, AttentionSpec) and node.spec.across
        else node
        for node in graph.nodes
    ]
    with pytest.raises(EngineFault, match="attends across to layer 0, which its own tokens write"):
        verify(Graph(tuple(nodes), graph.outputs))
