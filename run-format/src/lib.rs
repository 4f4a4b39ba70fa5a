//! What a fabscope run is: boundaries, stages, records, manifest, writer and reader.
