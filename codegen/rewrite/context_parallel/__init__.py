"""Context parallelism: ranks share the sequence, parameters are whole. See `smpc.codegen.rewrite.context_parallel.rewrite`."""
