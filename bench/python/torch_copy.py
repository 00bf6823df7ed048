"""Pages between two torch tensors [layers, pages, elements] on the CPU.

way "each": one copy_ for every page and layer. way "strided": one copy_ for every
page, all layers at once.
"""

from rival import Missing, serve


def prepare(config):
    try:
        import torch
    except ImportError as e:
        raise Missing("torch", "pip install torch numpy") from e
    torch.set_num_threads(1)
    layers, pages, elements = config["layers"], config["pages"], config["row_bytes"] // 2
    device = torch.ones(layers, pages, elements, dtype=torch.bfloat16)
    host = torch.zeros(layers, pages, elements, dtype=torch.bfloat16)
    moves = list(zip(config["dst"], config["src"]))

    def each():
        for dst, src in moves:
            for layer in range(layers):
                host[layer, dst].copy_(device[layer, src])

    def strided():
        for dst, src in moves:
            host[:, dst].copy_(device[:, src])

    work = {"each": each, "strided": strided}[config["way"]]
    return f"torch {torch.__version__}", work


serve(prepare)
