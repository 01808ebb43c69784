"""A real pretrained model, two real tasks: what rounding does where weights were learned (``make real``)."""
