import torch
from kvcalc.attention.grouped import GroupedAttention
from kvcalc.attention.latent import MultiHeadLatentAttention
from kvcalc.attention.cache import TokenCache
def test_a():
    for w in (None, 5):
        for g in (1,2,8):
            torch.manual_seed(0)
            m=GroupedAttention(64,8,g,16,rope_dim=16,window=w)
            x=torch.randn(2,17,64)
            full=m(x)
            c=TokenCache(2,m.cache_shapes(),17,w,torch.float32,torch.device('cpu'))
            parts=[m(x[:,:6],c),m(x[:,6:10],c)]+[m(x[:,i:i+1],c) for i in range(10,17)]
            assert (torch.cat(parts,1)-full).abs().max()<1e-5
        m=MultiHeadLatentAttention(64,4,32,16,8,16,q_lora_rank=24,window=w)
        full=m(x)
        c=TokenCache(2,m.cache_shapes(),17,w,torch.float32,torch.device('cpu'))
        parts=[m(x[:,:6],c),m(x[:,6:10],c)]+[m(x[:,i:i+1],c) for i in range(10,17)]
        assert (torch.cat(parts,1)-full).abs().max()<1e-5
