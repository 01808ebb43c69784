"""The model runner, its graphs in two variants, and faster paths through attention and norms."""
