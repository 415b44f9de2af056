"""Reports as one self-contained HTML file: tables, error maps, the graph, training curves."""
