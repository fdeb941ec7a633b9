"""A trace as a graph to cut: what may not be separated, what crosses a cut, what is computed again; and the plan."""
