"""What several tests build: problems, networks, sources of rows, run folders, processes.

- ``helpers``: seeded tensors, small problems, comparisons of trees, errors by code and place
- ``field_problems``, ``source_problems``, ``own_problems``: lower levels for methods and tasks
- ``less_runs``, ``online_loops``: mix methods by their definitions
- ``source_files``, ``language_models``, ``chat_templates``: files of rows, tiny models, templates
- ``grid_plugin``, ``executor_grids``: a plugin whose runs fail or wait on request, and its grids
- ``made_runs``: run folders written without a run
- ``fakes``: distributions and servers that exist only in a test
- ``processes``: scripts and commands in separate processes
- ``threads``: the ranks of a run as threads of one process
- ``step_graphs``, ``waiting``: what a step retains, and when it waits for a device
"""
