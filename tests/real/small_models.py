"""Models for engines.py: a GGUF of random weights, and a repository of Triton.

The GGUF is a llama of two layers over 300 tokens. Its output favours whole words, so that an answer
is valid UTF-8 and never ends by itself. The models of Triton are Python: `alone` has one instance and
no batches, `together` batches up to four requests, and `flowing` answers with a stream. Each adds the
sizes of its batches to a file, because Triton does not report how many requests were inside at once.
"""

import pathlib
import shutil

WORDS = "the fox dog a of and to in is it on by at we he she you sun sky sea red old new big wet dry".split()
VOCABULARY, WIDTH, LAYERS, HEADS, INNER, CONTEXT = 300, 64, 2, 4, 128, 8192


def write_gguf(path):
    import gguf
    import numpy

    random = numpy.random.default_rng(0)
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    words = [f"\u2581{word}" for word in WORDS]
    words += [f"\u2581w{index}" for index in range(VOCABULARY - len(tokens) - len(words))]
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(CONTEXT)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(WIDTH // HEADS)
    file.add_vocab_size(VOCABULARY)
    file.add_file_type(0)
    file.add_tokenizer_model("llama")
    file.add_token_list(tokens + [word.encode() for word in words])
    file.add_token_scores([0.0] * VOCABULARY)
    file.add_token_types(kinds + [1] * len(words))
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)

    def tensor(name, *shape):
        return name, (random.standard_normal(shape) * 0.05).astype(numpy.float32)

    _, embedding = tensor("", VOCABULARY, WIDTH)
    # The first dimension is large in every hidden state, and only words have a positive output
    # weight for it.
    embedding[:, 0] = 5.0
    _, output = tensor("", VOCABULARY, WIDTH)
    output[:259, 0], output[259:, 0] = -4.0, 4.0
    ones = numpy.ones(WIDTH, numpy.float32)
    tensors = [("token_embd.weight", embedding), ("output_norm.weight", ones), ("output.weight", output)]
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        tensors += [(f"{block}attn_norm.weight", ones), (f"{block}ffn_norm.weight", ones)]
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors.append(tensor(f"{block}{name}.weight", WIDTH, WIDTH))
        tensors += [tensor(f"{block}ffn_{name}.weight", INNER, WIDTH) for name in ("gate", "up")]
        tensors.append(tensor(f"{block}ffn_down.weight", WIDTH, INNER))
    for name, values in tensors:
        file.add_tensor(name, values)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


CONFIG = """name: "{name}"
backend: "python"
max_batch_size: {batch}
input [ {{ name: "text" data_type: TYPE_STRING dims: [1] }} ]
output [ {{ name: "out" data_type: TYPE_STRING dims: [1] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
{more}
"""

WHOLE = """import sys, time
sys.path.insert(0, {site!r})
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        with open({seen!r}, "a") as file:
            file.write(f"{{len(requests)}}\\n")
        time.sleep({seconds})
        out = []
        for request in requests:
            text = pb.get_input_tensor_by_name(request, "text").as_numpy()
            out.append(pb.InferenceResponse([pb.Tensor("out", text)]))
        return out
"""

STREAM = """import sys, time
sys.path.insert(0, {site!r})
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, sent = request.get_response_sender(), 0
            while sent < 20 and not request.is_cancelled():
                piece = np.array([[f"piece {{sent}}".encode()]], dtype=object)
                sender.send(pb.InferenceResponse([pb.Tensor("out", piece[0])]))
                sent += 1
                time.sleep({seconds})
            with open({seen!r}, "a") as file:
                file.write(f"{{sent}}\\n")
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_repository(folder, seen, site):
    """Writes models into `folder`. The file `seen/NAME` has a line for each batch or stream. `site` has
    numpy, because the backend ignores PYTHONPATH."""
    folder, seen = pathlib.Path(folder), pathlib.Path(seen)
    shutil.rmtree(folder, ignore_errors=True)
    seen.mkdir(parents=True, exist_ok=True)
    batching = "dynamic_batching { max_queue_delay_microseconds: 20000 }"
    models = (
        ("alone", 0, "", WHOLE, 0.1),
        ("together", 4, batching, WHOLE, 0.2),
        ("flowing", 0, "model_transaction_policy { decoupled: true }", STREAM, 0.1),
    )
    for name, batch, more, program, seconds in models:
        model = folder / name
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(CONFIG.format(name=name, batch=batch, more=more))
        (model / "1" / "model.py").write_text(program.format(seen=str(seen / name), seconds=seconds, site=str(site)))


def tritonserver(site, folder):
    """Makes `folder` with the backends and the stub for this Python. Returns the program and the
    folder of the backends."""
    import sys

    source, folder = pathlib.Path(site) / "pytriton" / "tritonserver", pathlib.Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source / "backends", folder / "backends")
    stub = source / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}" / "triton_python_backend_stub"
    shutil.copy(stub, folder / "backends" / "python")
    return source / "bin" / "tritonserver", folder / "backends"
