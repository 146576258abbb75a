"""min_p, top_k and top_p: tokens too unlikely to be sampled lose their chance."""
